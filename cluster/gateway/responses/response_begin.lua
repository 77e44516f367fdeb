-- Notes that a response which was stored just now is made in the background. After response_put.lua.
--
-- ARGV[8]: milliseconds until its gateway has to say again that it works on it.
local state = ARGV[1] .. id .. ':state'
redis.call('HSET', state, 'state', 'queued', 'until', math.floor(now / 1000) + tonumber(ARGV[8]))
redis.call('EXPIRE', state, ttl)
