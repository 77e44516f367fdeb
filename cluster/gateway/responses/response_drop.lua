-- Drops one of a tenant's stored responses (response_store.py), for the scripts that begin with this.
--
-- KEYS: the ids by the end of their life, their sizes. ARGV[1..3]: prefix of their keys, the sizes' field of the sum,
-- an id.
local total = tonumber(redis.call('HGET', KEYS[2], ARGV[2]) or '0')
local function drop(id)
  local size = redis.call('HGET', KEYS[2], id)
  total = total - tonumber(size or '0')
  redis.call('HDEL', KEYS[2], id)
  redis.call('ZREM', KEYS[1], id)
  redis.call('DEL', ARGV[1] .. id .. ':state')
  return redis.call('DEL', ARGV[1] .. id)
end
