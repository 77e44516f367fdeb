-- Stores a response beside its events, if it has some, and drops those that are over and the oldest beyond the caps.
-- Returns "too_large", and stores nothing, where its bytes alone exceed them. After response_drop.lua.
--
-- ARGV[4..7]: value, lifetime in seconds, most bytes, most responses.
local id, value, ttl = ARGV[3], ARGV[4], tonumber(ARGV[5])
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now)) do drop(gone) end
local more = #value - redis.call('STRLEN', ARGV[1] .. id)
if not make_room(id, more, tonumber(ARGV[6])) then
  redis.call('HSET', ARGV[1] .. id .. ':state', 'state', 'too_large')
  redis.call('HSET', KEYS[2], ARGV[2], total)
  return 'too_large'
end
redis.call('ZREM', KEYS[1], id)
while redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[7]) do drop(redis.call('ZRANGE', KEYS[1], 0, 0)[1]) end
redis.call('DEL', ARGV[1] .. id .. ':state')
redis.call('SET', ARGV[1] .. id, value, 'EX', ttl)
redis.call('ZADD', KEYS[1], string.format('%.0f', now + ttl * 1000000), id)
grow(id, more)
redis.call('EXPIRE', KEYS[1], ttl)
redis.call('EXPIRE', KEYS[2], ttl)
redis.call('EXPIRE', ARGV[1] .. id .. ':events', ttl)
