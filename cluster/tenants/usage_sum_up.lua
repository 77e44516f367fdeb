-- Replaces usage rows by sums.
--
-- KEYS: rows, sums, USAGE_SUMMED. ARGV: how many rows, their ids, until when rows are sums now, how long that is kept,
-- fields and amounts. Nothing when one of the rows is gone. Deletes first: a script that has written may write on in a
-- full memory. The moment is never taken back, or a journal that is sent again counts twice.
local first = 3 + tonumber(ARGV[1])
for i = 2, first - 2 do
  if redis.call('HEXISTS', KEYS[1], ARGV[i]) == 0 then return 0 end
end
for i = 2, first - 2 do redis.call('HDEL', KEYS[1], ARGV[i]) end
for i = first + 1, #ARGV, 2 do redis.call('HINCRBY', KEYS[2], ARGV[i], ARGV[i + 1]) end
redis.call('EXPIRE', KEYS[2], ARGV[first])
local summed_s = redis.call('GET', KEYS[3])
if tonumber(ARGV[first - 1]) > tonumber(summed_s or '0') then summed_s = ARGV[first - 1] end
redis.call('SET', KEYS[3], summed_s, 'EX', ARGV[first])
return 1
