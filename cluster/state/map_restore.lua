-- Makes an older copy of the map what it was. After map_counter.lua.
--
-- ARGV[2..5]: id and counter expected, next counter, how many names to remove; these; then names and values.
-- Returns the counter; nil: the map was changed meanwhile.
if (redis.call('GET', KEYS[2]) or '') ~= ARGV[2] or counter() ~= tonumber(ARGV[3]) then return false end
local first = 6 + tonumber(ARGV[5])
for i = 6, first - 1 do redis.call('HDEL', KEYS[1], ARGV[i]) end
for i = first, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
return count_to(tonumber(ARGV[4]))
