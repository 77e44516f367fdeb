-- Appends a batch to the events of a background response; the oldest others go for it. Returns "too_large", which ends
-- the response, where its bytes alone are too many. After response_running.lua.
--
-- ARGV[4..6]: the batch, the number of events up to its end, which is its name, most bytes. A batch that is appended
-- twice is there once.
local id, batch, number, place = ARGV[3], ARGV[4], ARGV[5], ARGV[1] .. ARGV[3] .. ':events'
local last = redis.call('XREVRANGE', place, '+', '-', 'COUNT', 1)[1]
if last and tonumber(string.match(last[1], '%d+')) >= tonumber(number) then return end
if not make_room(id, #batch, tonumber(ARGV[6])) then
  redis.call('HSET', ARGV[1] .. id .. ':state', 'state', 'too_large')
  return 'too_large'
end
redis.call('XADD', place, number .. '-0', 'batch', batch)
redis.call('PEXPIRE', place, redis.call('PTTL', ARGV[1] .. id))
grow(id, #batch)
