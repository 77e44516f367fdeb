-- Goes on with, or ends, the run of a request with a key, if who asks is the one that runs it. Returns whether that is so.
--
-- KEYS: the key. ARGV: who asks; "renew" and milliseconds of the lease; "store", milliseconds of its life, the head and
-- body of the answer; "again" and milliseconds of its life: it has run, and runs again, with the same nonce, when it is
-- sent again; or "forget".
if redis.call('HGET', KEYS[1], 'holder') ~= ARGV[1] then return 0 end
if ARGV[2] == 'forget' then return redis.call('DEL', KEYS[1]) end
if ARGV[2] == 'renew' then
  local time = redis.call('TIME')
  local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
  redis.call('HSET', KEYS[1], 'until', now + tonumber(ARGV[3]))
  return 1
end
redis.call('HDEL', KEYS[1], 'until', 'holder')
if ARGV[2] == 'store' then redis.call('HSET', KEYS[1], 'head', ARGV[4], 'body', ARGV[5]) end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
