-- Reads of the rows of a batch. Returns "lost" where another gateway has its lease.
--
-- KEYS: the rows, the lease. ARGV: who asks, HKEYS or HMGET, the fields of the latter.
if redis.call('GET', KEYS[2]) ~= ARGV[1] then return 'lost' end
return redis.call(ARGV[2], KEYS[1], unpack(ARGV, 3))
