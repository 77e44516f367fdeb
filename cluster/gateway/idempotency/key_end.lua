-- Goes on with, or ends, the run of a request with a key, if who asks is the one that runs it. Returns whether that is so.
-- After key_count.lua.
--
-- ARGV[2..4]: who asks, what, milliseconds of the key's life from now. What: "renew", with milliseconds of the lease;
-- "store", with the head and body of the answer and most bytes of all answers of the tenant, beyond which it is "again";
-- "again": it has run, and runs again, with the same nonce, when it is sent again; or "forget".
if redis.call('HGET', KEYS[1], 'holder') ~= ARGV[2] then return 0 end
local what = ARGV[3]
if what == 'forget' then
  redis.call('DEL', KEYS[1])
  uncount(id)
  return 1
end
if what == 'renew' then
  redis.call('HSET', KEYS[1], 'until', now + tonumber(ARGV[5]))
else
  redis.call('HDEL', KEYS[1], 'until', 'holder')
end
if what == 'store' then
  uncount_those_that_are_over()
  local more = #ARGV[5] + #ARGV[6]
  if tonumber(redis.call('HGET', KEYS[3], TOTAL) or '0') + more <= tonumber(ARGV[7]) then
    redis.call('HSET', KEYS[1], 'head', ARGV[5], 'body', ARGV[6])
    redis.call('HSET', KEYS[3], id, more)
    redis.call('HINCRBY', KEYS[3], TOTAL, more)
  end
end
keep(tonumber(ARGV[4]))
return 1
