-- Deletes a response, if it is there. After response_drop.lua.
drop(ARGV[3])
if redis.call('EXISTS', KEYS[2]) == 1 then redis.call('HSET', KEYS[2], ARGV[2], total) end
