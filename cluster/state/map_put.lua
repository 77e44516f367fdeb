-- Sets one entry by compare-and-set. After map_counter.lua.
--
-- ARGV[2..7]: name, value expected and value wanted ('' none), counter expected ('' any), id of a map without one,
-- raise.
-- Returns the counter, also where the value is as wanted already: a client may send it twice. nil: nothing was changed.
local now = redis.call('HGET', KEYS[1], ARGV[2]) or ''
if now == ARGV[4] then return counter() end
if now ~= ARGV[3] or (ARGV[5] ~= '' and counter() ~= tonumber(ARGV[5])) then return false end
if ARGV[4] == '' then redis.call('HDEL', KEYS[1], ARGV[2]) else redis.call('HSET', KEYS[1], ARGV[2], ARGV[4]) end
if ARGV[6] ~= '' then redis.call('SET', KEYS[2], ARGV[6], 'NX') end
return count_to(counter() + tonumber(ARGV[7]))
