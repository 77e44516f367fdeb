-- Writes an event of a group to the list that the launcher reads, and counts it once, however many tell of it.
--
-- KEYS: the list; the tally, a hash; what was counted, a sorted set by time. ARGV: the event; most entries of the list,
-- and its TTL; most entries of the set, and the TTL of it and of the tally; what is counted once ('': nothing); the
-- tally's field ('': none).
redis.call('RPUSH', KEYS[1], ARGV[1])
redis.call('LTRIM', KEYS[1], -ARGV[2], -1)
redis.call('EXPIRE', KEYS[1], ARGV[3])
if ARGV[6] == '' then return 0 end
local now_s = redis.call('TIME')[1]
local is_new = redis.call('ZADD', KEYS[3], 'NX', now_s, ARGV[6])
redis.call('ZREMRANGEBYRANK', KEYS[3], 0, -ARGV[4] - 1)
redis.call('EXPIRE', KEYS[3], ARGV[5])
if is_new == 0 or ARGV[7] == '' then return 0 end
redis.call('HINCRBY', KEYS[2], ARGV[7], 1)
if ARGV[7] == 'losses' then redis.call('HSET', KEYS[2], 'last_loss', ARGV[1], 'last_loss_s', now_s) end
redis.call('EXPIRE', KEYS[2], ARGV[5])
return 1
