-- Counts a tenant's keys and the bytes of their answers (key_store.py), for the scripts that begin with this.
--
-- KEYS: the key, the tenant's keys by the end of their life, the bytes of their answers. ARGV[1]: its name among them.
local TOTAL = '@total'
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local id = ARGV[1]
local function uncount(one)
  local size = tonumber(redis.call('HGET', KEYS[3], one) or '0')
  redis.call('ZREM', KEYS[2], one)
  redis.call('HDEL', KEYS[3], one)
  if size ~= 0 then redis.call('HINCRBY', KEYS[3], TOTAL, -size) end
end
local function uncount_those_that_are_over()
  for _, one in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, 256)) do uncount(one) end
end
-- Keeps the key, and what counts it, for so many milliseconds from now.
local function keep(life)
  redis.call('PEXPIRE', KEYS[1], life)
  redis.call('ZADD', KEYS[2], string.format('%.0f', now + life), id)
  for i = 2, 3 do
    if redis.call('PTTL', KEYS[i]) < life then redis.call('PEXPIRE', KEYS[i], life) end
  end
end
