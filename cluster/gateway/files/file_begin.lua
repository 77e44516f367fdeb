-- Begins to write a file, anew where it was begun before. After file_drop.lua. Returns "many" where there are too many.
--
-- ARGV[3..4]: milliseconds that it is kept if nobody goes on, most files.
drop_those_that_are_over()
drop(id)
if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[4]) then return 'many' end
redis.call('HSET', KEYS[2], id, 0)
keep(tonumber(ARGV[3]))
return 'ok'
