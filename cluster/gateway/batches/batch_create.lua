-- Stores a batch that is to be run, once, and keeps its input for as long as that may be read. Returns its facts, those
-- of one that is there already, which stays; "many" where its tenant has too many that are not over, "files" where it has
-- too many files, "gone" where the input is not there; then nothing is stored. Of those that are over the oldest go,
-- beyond so many.
--
-- KEYS: the tenant's batches, the batch, the live ones, the tenant's files, their bytes, the input, its pieces. ARGV: its
-- id, its member among the live ones, the tenant's prefix there, most live ones of a tenant, its facts, now (s), its
-- life, the time for which the input is read (ms), the ids of the input and of its output, most files, most batches,
-- prefix of batches' keys.
local facts = redis.call('HGET', KEYS[2], 'facts')
if facts then return facts end
local OVER = {completed = 1, failed = 1, expired = 1, cancelled = 1}
local live = 0
for _, one in ipairs(redis.call('ZRANGE', KEYS[3], 0, -1)) do
  if string.sub(one, 1, #ARGV[3]) == ARGV[3] then live = live + 1 end
end
if live >= tonumber(ARGV[4]) then return 'many' end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
if redis.call('ZCOUNT', KEYS[4], now, '+inf') >= tonumber(ARGV[11]) then return 'files' end
if redis.call('EXISTS', KEYS[6]) == 0 then return 'gone' end
local life, read = tonumber(ARGV[7]), tonumber(ARGV[8])
local function ends(after) return string.format('%.0f', now + after) end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
local beyond = redis.call('ZCARD', KEYS[1]) - tonumber(ARGV[12])
for _, one in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  if beyond < 0 then break end
  if OVER[redis.call('HGET', ARGV[13] .. one, 'status')] then
    redis.call('UNLINK', ARGV[13] .. one)
    redis.call('ZREM', KEYS[1], one)
    beyond = beyond - 1
  end
end
redis.call('ZADD', KEYS[1], ends(life), ARGV[1])
redis.call('HSET', KEYS[2], 'facts', ARGV[5], 'status', 'validating')
redis.call('PEXPIRE', KEYS[2], life)
redis.call('ZADD', KEYS[3], ARGV[6], ARGV[2])
-- rows count as bytes of the output from the first on
redis.call('ZADD', KEYS[4], ends(life), ARGV[10])
redis.call('HSET', KEYS[5], ARGV[10], 0)
if tonumber(redis.call('ZSCORE', KEYS[4], ARGV[9]) or '0') < now + read then
  redis.call('ZADD', KEYS[4], ends(read), ARGV[9])
  redis.call('PEXPIRE', KEYS[6], read)
  redis.call('PEXPIRE', KEYS[7], read)
end
local longest = math.max(life, read)
for _, key in ipairs({KEYS[1], KEYS[3], KEYS[4], KEYS[5]}) do
  if redis.call('PTTL', key) < longest then redis.call('PEXPIRE', key, longest) end
end
return ARGV[5]
