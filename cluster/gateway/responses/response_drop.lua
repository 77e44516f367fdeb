-- Drops and counts a tenant's stored responses (response_store.py), for the scripts that begin with this.
--
-- KEYS: the ids by the end of their life, their bytes. ARGV[1..3]: prefix of their keys, the field of the bytes' sum, an
-- id. The bytes of a response are those of its value and of its events.
local total = tonumber(redis.call('HGET', KEYS[2], ARGV[2]) or '0')
local function size(id) return tonumber(redis.call('HGET', KEYS[2], id) or '0') end
local function drop(id)
  total = total - size(id)
  redis.call('HDEL', KEYS[2], id)
  redis.call('ZREM', KEYS[1], id)
  redis.call('DEL', ARGV[1] .. id .. ':state', ARGV[1] .. id .. ':events')
  return redis.call('DEL', ARGV[1] .. id)
end
-- Makes room for more bytes of a response: the oldest others go. False, and none goes, where it alone has too many.
local function make_room(own, more, most)
  if size(own) + more > most then return false end
  while total + more > most do
    local oldest = redis.call('ZRANGE', KEYS[1], 0, 1)
    local other = oldest[1] == own and oldest[2] or oldest[1]
    if not other then break end
    drop(other)
  end
  return true
end
-- Counts more bytes of a response.
local function grow(id, more)
  total = total + more
  redis.call('HINCRBY', KEYS[2], id, more)
  redis.call('HSET', KEYS[2], ARGV[2], total)
end
