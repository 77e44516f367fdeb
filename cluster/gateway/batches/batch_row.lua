-- Keeps the output row of a line, unless it has one. Returns the status of the batch and the bytes of all files of its
-- tenant; "lost", keeping nothing, where another gateway has its lease.
--
-- KEYS: the batch, its rows, its lease, the bytes of the tenant's files. ARGV: who asks, the line's number, the row,
-- "completed" or "failed", the row's bytes before compression, the id of the output, milliseconds of the batch's life.
if redis.call('GET', KEYS[3]) ~= ARGV[1] then return {'lost', 0} end
if redis.call('HSETNX', KEYS[2], ARGV[2], ARGV[3]) == 1 then
  redis.call('PEXPIRE', KEYS[2], ARGV[7])
  redis.call('HINCRBY', KEYS[1], ARGV[4], 1)
  redis.call('HINCRBY', KEYS[4], ARGV[6], ARGV[5])
  redis.call('HINCRBY', KEYS[4], '@total', ARGV[5])
end
return {redis.call('HGET', KEYS[1], 'status') or 'gone', tonumber(redis.call('HGET', KEYS[4], '@total') or '0')}
