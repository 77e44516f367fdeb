-- Keeps the output row of a line, unless it has one. Returns the status of the batch and the bytes of all files of its
-- tenant; "lost", keeping nothing, where another gateway has its lease, and where its lines are over.
--
-- KEYS: the batch, its rows, its lease, the bytes of the tenant's files. ARGV: who asks, the line's number, the row,
-- "completed" or "failed", the row's bytes before compression, the id of the output, milliseconds of the batch's life.
local TAKES_ROWS = {in_progress = 1, cancelling = 1}
local status = redis.call('HGET', KEYS[1], 'status')
if redis.call('GET', KEYS[3]) ~= ARGV[1] or not TAKES_ROWS[status] then return {'lost', 0} end
if redis.call('HSETNX', KEYS[2], ARGV[2], ARGV[3]) == 1 then
  redis.call('PEXPIRE', KEYS[2], ARGV[7])
  redis.call('HINCRBY', KEYS[1], ARGV[4], 1)
  redis.call('HINCRBY', KEYS[4], ARGV[6], ARGV[5])
  redis.call('HINCRBY', KEYS[4], '@total', ARGV[5])
end
return {status, tonumber(redis.call('HGET', KEYS[4], '@total') or '0')}
