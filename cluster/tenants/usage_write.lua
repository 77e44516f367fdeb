-- Writes usage rows, each only where there is none, or one that says that its gateway was lost: a request with an
-- Idempotency-Key that was run again has the same id.
--
-- KEYS: USAGE_SUMMED, USAGE_ORIGIN, counter, sent, then for each place (tenant and day) its rows and the day's tenants.
-- ARGV: how long rows are kept, the counter, up to when all is sent, how many places, the tenant of each, then for each
-- row its place, time, id and value. Returns the ids of those that are not written: their hour is sums. Rows are first,
-- so that a full memory refuses it all.
local summed_s, places = tonumber(redis.call('GET', KEYS[1]) or '0'), tonumber(ARGV[4])
local late = {}
local function write(place, id, row)
  if redis.call('HSETNX', place, id, row) == 1 then return end
  if cmsgpack.unpack(redis.call('HGET', place, id))[5] == 'client_lost' then redis.call('HSET', place, id, row) end
end
for i = 5 + places, #ARGV, 4 do
  if tonumber(ARGV[i + 1]) < summed_s then late[#late + 1] = ARGV[i + 2]
  else write(KEYS[3 + 2 * tonumber(ARGV[i])], ARGV[i + 2], ARGV[i + 3]) end
end
redis.call('EXPIRE', KEYS[2], ARGV[1])
redis.call('SET', KEYS[3], ARGV[2], 'EX', ARGV[1])
local sent_s = redis.call('GET', KEYS[4])
if tonumber(ARGV[3]) > tonumber(sent_s or '0') then sent_s = ARGV[3] end
if sent_s then redis.call('SET', KEYS[4], sent_s, 'EX', ARGV[1]) end
for place = 1, places do
  redis.call('EXPIRE', KEYS[3 + 2 * place], ARGV[1])
  redis.call('SADD', KEYS[4 + 2 * place], ARGV[4 + place])
  redis.call('EXPIRE', KEYS[4 + 2 * place], ARGV[1])
end
return late
