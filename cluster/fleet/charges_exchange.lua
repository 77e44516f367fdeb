-- Adds ARGV[7..] (tenant, charge, ...) unless it has been added under this number; returns what changed since a time.
--
-- KEYS: the totals, the times of their last changes in microseconds (or later, so that they only grow), the number of
-- the group's last addition. ARGV: TTL in ms, IDLE_S in microseconds, number, the name of the totals that the group
-- knows, the time of its last look, a name for new totals. Returns the name, the time, and tenants with their totals.
local function each(list, call)
  for first = 1, #list, 1000 do call(unpack(list, first, math.min(first + 999, #list))) end
end
local totals, changes, own = KEYS[1], KEYS[2], KEYS[3]
local ttl, idle, number, origin, since = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5]
local found = redis.call('HGET', totals, '')
if not found then
  redis.call('DEL', totals, changes)
  found = ARGV[6]
  redis.call('HSET', totals, '', found)
end
if found ~= origin then since = '0' end
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local last = redis.call('ZREVRANGE', changes, 0, 0, 'WITHSCORES')
if last[2] and tonumber(last[2]) >= now then now = tonumber(last[2]) + 1 end
local gone = redis.call('ZRANGEBYSCORE', changes, '-inf', string.format('(%.0f', now - idle))
each(gone, function(...) redis.call('HDEL', totals, ...) redis.call('ZREM', changes, ...) end)
if #ARGV > 6 and redis.call('GET', own) ~= number then
  local names = {}
  for i = 7, #ARGV, 2 do names[#names + 1] = ARGV[i] end
  local before, place, sums, scores = {}, 0, {}, {}
  each(names, function(...) for _, v in ipairs(redis.call('HMGET', totals, ...)) do before[#before + 1] = v end end)
  local score = string.format('%.0f', now)
  for i, name in ipairs(names) do
    sums[2 * i - 1], sums[2 * i] = name, string.format('%.17g', (tonumber(before[i]) or 0) + ARGV[6 + 2 * i])
    scores[2 * i - 1], scores[2 * i] = score, name
  end
  each(sums, function(...) redis.call('HSET', totals, ...) end)
  each(scores, function(...) redis.call('ZADD', changes, ...) end)
  redis.call('SET', own, number)
end
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ttl) end
local names = redis.call('ZRANGEBYSCORE', changes, '(' .. since, '+inf')
local values = {}
each(names, function(...) for _, v in ipairs(redis.call('HMGET', totals, ...)) do values[#values + 1] = v end end)
return {found, string.format('%.0f', now), names, values}
