-- The counter of a durable map's epoch (durable_map.py), for the scripts that begin with this.
--
-- KEYS: entries, id, counter, absorbed. ARGV[1]: the counter's field, '' where it is a key of its own.
-- count_to() also announces the change.
local field = ARGV[1]
local function counter()
  local value
  if field == '' then value = redis.call('GET', KEYS[3]) else value = redis.call('HGET', KEYS[3], field) end
  return tonumber(value or '0')
end
local function count_to(number)
  local value = string.format('%d', number)
  if field == '' then redis.call('SET', KEYS[3], value) else redis.call('HSET', KEYS[3], field, value) end
  redis.pcall('PUBLISH', KEYS[1], '') -- pcall: a user who may not publish may still write
  return number
end
