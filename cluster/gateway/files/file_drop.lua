-- Counts and drops a tenant's files (file_store.py), for the scripts that begin with this.
--
-- KEYS: its files by the end of their life, their bytes; for the output of a batch also that and its lease. ARGV[1..2]:
-- prefix of their keys, an id. For an output the last one is who asks: returns "lost", changing nothing, unless it has
-- the lease of a batch whose files are being written.
local WRITTEN = {finalizing = 1, cancelling = 1}
if KEYS[3] and not (redis.call('GET', KEYS[4]) == ARGV[#ARGV] and WRITTEN[redis.call('HGET', KEYS[3], 'status')]) then
  return 'lost'
end
local TOTAL = '@total'
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local id = ARGV[2]
local function drop(one)
  local size = tonumber(redis.call('HGET', KEYS[2], one) or '0')
  redis.call('HDEL', KEYS[2], one)
  redis.call('ZREM', KEYS[1], one)
  if size ~= 0 then redis.call('HINCRBY', KEYS[2], TOTAL, -size) end
  redis.call('UNLINK', ARGV[1] .. 'data:' .. one)
  return redis.call('DEL', ARGV[1] .. 'record:' .. one)
end
local function drop_those_that_are_over()
  for _, one in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, 256)) do drop(one) end
end
-- Keeps a file, and the keys of all, for so many milliseconds from now.
local function keep(life)
  redis.call('ZADD', KEYS[1], string.format('%.0f', now + life), id)
  for _, key in ipairs({KEYS[1], KEYS[2]}) do
    if redis.call('PTTL', key) < life then redis.call('PEXPIRE', key, life) end
  end
  redis.call('PEXPIRE', ARGV[1] .. 'data:' .. id, life)
end
