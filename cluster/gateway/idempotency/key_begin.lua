-- Asks what becomes of a request with a key. Returns "other" where the key was used with another body, "wait" while a
-- gateway answers it, "answer" where that is stored, "many" where the tenant has too many keys, or "mine", its nonce and
-- the number of its run: who asks answers it. Who asks twice gets the same. After key_count.lua.
--
-- ARGV[2..7]: digest of the request, who asks, a fresh nonce, milliseconds of the lease and of the key's life, most keys.
local request = redis.call('HGET', KEYS[1], 'request')
if request and request ~= ARGV[2] then return {'other'} end
if redis.call('HEXISTS', KEYS[1], 'head') == 1 then return {'answer'} end
local held = redis.call('HMGET', KEYS[1], 'holder', 'until', 'nonce', 'runs')
if held[1] == ARGV[3] then return {'mine', held[3], held[4]} end
if held[2] and tonumber(held[2]) >= now then return {'wait'} end
if not request then
  uncount_those_that_are_over()
  uncount(id)
  if redis.call('ZCARD', KEYS[2]) >= tonumber(ARGV[7]) then return {'many'} end
  redis.call('HSET', KEYS[1], 'request', ARGV[2], 'nonce', ARGV[4])
end
redis.call('HSET', KEYS[1], 'holder', ARGV[3], 'until', now + tonumber(ARGV[5]))
keep(tonumber(ARGV[6]))
return {'mine', redis.call('HGET', KEYS[1], 'nonce'), redis.call('HINCRBY', KEYS[1], 'runs', 1)}
