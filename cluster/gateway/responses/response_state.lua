-- Returns the state of a background response after it was changed as wished, nil where there is none. States that end
-- it stay: cancelled, and lost, which is one whose gateway has not been heard in time.
--
-- KEYS: its state. ARGV: renew, in_progress (both of its gateway), cancelled or look; milliseconds of a renewal.
local state = redis.call('HGET', KEYS[1], 'state')
if state ~= 'queued' and state ~= 'in_progress' then return state end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
if ARGV[1] == 'renew' or ARGV[1] == 'in_progress' then
  redis.call('HSET', KEYS[1], 'until', now + tonumber(ARGV[2]))
  if ARGV[1] == 'in_progress' then state = ARGV[1] end
elseif tonumber(redis.call('HGET', KEYS[1], 'until')) < now then
  state = 'lost'
elseif ARGV[1] == 'cancelled' then
  state = ARGV[1]
end
redis.call('HSET', KEYS[1], 'state', state)
return state
