-- Says that a file is whole. After file_drop.lua. Returns "gone" where it is not written any more.
--
-- ARGV[3..4]: its record, milliseconds of its life.
if not redis.call('ZSCORE', KEYS[1], id) then return 'gone' end
redis.call('SET', ARGV[1] .. 'record:' .. id, ARGV[3], 'PX', ARGV[4])
keep(tonumber(ARGV[4]))
return 'ok'
