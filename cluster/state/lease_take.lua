-- Takes or renews a lease: KEYS[1] for the holder ARGV[1], for ARGV[2] ms. 0: another holds it.
--
-- Deletes first: a script that has written may write on in a full memory, and who makes room needs the lease then.
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
