-- Asks what becomes of a request with a key. Returns "other" where the key was used with another body, "wait" while a
-- gateway answers it, "answer" with what was stored, or "mine", its nonce and the number of its run: who asks answers it.
--
-- KEYS: the key. ARGV: digest of the request, who asks, a fresh nonce, milliseconds of the lease, and of its life.
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local request = redis.call('HGET', KEYS[1], 'request')
if request and request ~= ARGV[1] then return {'other'} end
local answer = redis.call('HMGET', KEYS[1], 'head', 'body')
if answer[1] then return {'answer', answer[1], answer[2]} end
local lease = redis.call('HGET', KEYS[1], 'until')
if request and lease and tonumber(lease) >= now then return {'wait'} end
if not request then redis.call('HSET', KEYS[1], 'request', ARGV[1], 'nonce', ARGV[3]) end
redis.call('HSET', KEYS[1], 'holder', ARGV[2], 'until', now + tonumber(ARGV[4]))
redis.call('PEXPIRE', KEYS[1], ARGV[5])
return {'mine', redis.call('HGET', KEYS[1], 'nonce'), redis.call('HINCRBY', KEYS[1], 'runs', 1)}
