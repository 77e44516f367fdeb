-- Stores a batch that is to be run, once. Returns its facts, those of one that is there already, which stays; "many", and
-- stores nothing, where its tenant has too many that are not over.
--
-- KEYS: the tenant's batches, the batch, the live ones, the tenant's files, their bytes. ARGV: its id, its member among
-- the live ones, the tenant's prefix there, most live ones of a tenant, its facts, now (s), its life and that of its
-- output (ms), the id of its output.
local facts = redis.call('HGET', KEYS[2], 'facts')
if facts then return facts end
local live = 0
for _, one in ipairs(redis.call('ZRANGE', KEYS[3], 0, -1)) do
  if string.sub(one, 1, #ARGV[3]) == ARGV[3] then live = live + 1 end
end
if live >= tonumber(ARGV[4]) then return 'many' end
local time = redis.call('TIME')
local now, life = tonumber(time[1]) * 1000, tonumber(ARGV[7])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('ZADD', KEYS[1], string.format('%.0f', now + life), ARGV[1])
redis.call('HSET', KEYS[2], 'facts', ARGV[5], 'status', 'validating')
redis.call('PEXPIRE', KEYS[2], life)
redis.call('ZADD', KEYS[3], ARGV[6], ARGV[2])
-- rows count as bytes of the output from the first on
redis.call('ZADD', KEYS[4], string.format('%.0f', now + life), ARGV[9])
redis.call('HSET', KEYS[5], ARGV[9], 0)
for _, key in ipairs({KEYS[1], KEYS[4], KEYS[5]}) do
  if redis.call('PTTL', key) < life then redis.call('PEXPIRE', key, life) end
end
return ARGV[5]
