-- Notes that a response which was stored just now is made in the background. After response_put.lua.
--
-- ARGV[8]: milliseconds until its gateway has to say again that it works on it. ARGV[9..10]: the first batch of its
-- events and their number; none where they are not kept.
local state = ARGV[1] .. id .. ':state'
redis.call('HSET', state, 'state', 'queued', 'until', math.floor(now / 1000) + tonumber(ARGV[8]))
redis.call('EXPIRE', state, ttl)
if not ARGV[9] or redis.call('EXISTS', ARGV[1] .. id .. ':events') == 1 then return end
make_room(id, #ARGV[9], tonumber(ARGV[6]))
redis.call('XADD', ARGV[1] .. id .. ':events', ARGV[10] .. '-0', 'batch', ARGV[9])
redis.call('EXPIRE', ARGV[1] .. id .. ':events', ttl)
grow(id, #ARGV[9])
