-- Deletes a response; 0: there was none. After response_drop.lua.
local found = drop(ARGV[3])
if redis.call('EXISTS', KEYS[2]) == 1 then redis.call('HSET', KEYS[2], ARGV[2], total) end
return found
