-- Writes a copy of the map where it was lost. After map_counter.lua.
--
-- ARGV[2..6]: id that the copy has ('' none), 'new' to write only where nothing ever was, id of a map without one,
-- counter of the copy, raise; then names and values. Values that are there stay: they were written after the loss. Who
-- finds its id absorbed finds its entries written back by another, and some removed again since.
-- Returns 1 if it wrote, the id, and the counter.
local id, at, own = redis.call('GET', KEYS[2]) or '', counter(), ARGV[2]
local is_there = own ~= '' and (id == own or redis.call('SISMEMBER', KEYS[4], own) == 1)
if at > 0 and (is_there or ARGV[3] == 'new') then return {0, id, at} end
for i = 7, #ARGV, 2 do redis.call('HSETNX', KEYS[1], ARGV[i], ARGV[i + 1]) end
if id == '' and ARGV[4] ~= '' then
  id = ARGV[4]
  redis.call('SET', KEYS[2], id)
end
if own ~= '' and own ~= id then redis.call('SADD', KEYS[4], own) end
return {1, id, count_to(math.max(at, tonumber(ARGV[5])) + tonumber(ARGV[6]))}
