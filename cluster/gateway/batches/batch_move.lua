-- Changes the status of a batch where that may follow on the one it has. Returns the status after it, nil where there is
-- no such batch, and "lost" where another gateway has its lease.
--
-- KEYS: the batch, the live ones, its rows, its lease. ARGV: the wish, now (s), its member among the live ones, who asks
-- ('' for a client, who needs no lease), then fields and values to set with it.
local BEFORE = {
  in_progress = {validating = 1}, finalizing = {validating = 1, in_progress = 1},
  completed = {finalizing = 1}, failed = {finalizing = 1}, expired = {finalizing = 1},
  cancelling = {validating = 1, in_progress = 1}, cancelled = {cancelling = 1},
}
local OVER = {completed = 1, failed = 1, expired = 1, cancelled = 1}
local status = redis.call('HGET', KEYS[1], 'status')
if not status then
  redis.call('ZREM', KEYS[2], ARGV[3])
  return status
end
if ARGV[4] ~= '' and redis.call('GET', KEYS[4]) ~= ARGV[4] then return 'lost' end
if not BEFORE[ARGV[1]][status] then return status end
redis.call('HSET', KEYS[1], 'status', ARGV[1], ARGV[1] .. '_at', ARGV[2])
for i = 5, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
if OVER[ARGV[1]] then
  redis.call('ZREM', KEYS[2], ARGV[3])
  redis.call('UNLINK', KEYS[3])
end
return ARGV[1]
