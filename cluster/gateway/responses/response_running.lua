-- Returns, changing nothing, the state of a background response that is over already, or "gone". Between
-- response_drop.lua and response_put.lua or response_append.lua.
local state = redis.call('HGET', ARGV[1] .. ARGV[3] .. ':state', 'state')
if state ~= 'queued' and state ~= 'in_progress' then return state or 'gone' end
