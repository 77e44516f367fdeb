-- Changes the state of a background response as wished, for the scripts that begin with this. States that end it stay:
-- cancelled, too_large, and lost, which is one whose gateway has not been heard in time. Whoever looks and finds its
-- lease over doubts it first: if Redis was away, nobody could be heard, and its gateway gets as long again.
--
-- wish: renew, in_progress (both of its gateway), cancelled, too_large or look; lease_ms: of a renewal. Returns the state
-- after it, nil where there is none.
local DOUBT_MS = 15000
local function state_after(key, wish, lease_ms)
  local state = redis.call('HGET', key, 'state')
  if state ~= 'queued' and state ~= 'in_progress' then return state end
  local time = redis.call('TIME')
  local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
  if wish == 'renew' or wish == 'in_progress' then
    redis.call('HSET', key, 'until', now + tonumber(lease_ms))
    redis.call('HDEL', key, 'doubted')
    if wish == 'in_progress' then state = wish end
  elseif wish ~= 'look' then
    state = wish
  elseif tonumber(redis.call('HGET', key, 'until')) < now then
    redis.call('HSETNX', key, 'doubted', now)
    if tonumber(redis.call('HGET', key, 'doubted')) + DOUBT_MS < now then state = 'lost' end
  end
  redis.call('HSET', key, 'state', state)
  return state
end
