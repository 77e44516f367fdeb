-- Stores a response, and drops those that are over and the oldest beyond the caps. After response_drop.lua.
--
-- ARGV[4..7]: value, lifetime in seconds, most bytes, most responses.
local id, value, ttl = ARGV[3], ARGV[4], tonumber(ARGV[5])
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now)) do drop(gone) end
drop(id)
while total + #value > tonumber(ARGV[6]) or redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[7]) do
  local oldest = redis.call('ZRANGE', KEYS[1], 0, 0)[1]
  if not oldest then break end
  drop(oldest)
end
redis.call('SET', ARGV[1] .. id, value, 'EX', ttl)
redis.call('ZADD', KEYS[1], string.format('%.0f', now + ttl * 1000000), id)
redis.call('HSET', KEYS[2], id, #value, ARGV[2], total + #value)
redis.call('EXPIRE', KEYS[1], ttl)
redis.call('EXPIRE', KEYS[2], ttl)
