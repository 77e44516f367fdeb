-- Appends a piece to a file that is written; a piece that is there already stays. After file_drop.lua. Returns "gone"
-- where it is not written any more, and "full", changing nothing, where the tenant's files would have too many bytes.
--
-- ARGV[3..7]: the piece's number, the piece, its bytes before compression, most bytes of the tenant (0: any number),
-- milliseconds that the file is kept if nobody goes on.
local data = ARGV[1] .. 'data:' .. id
if not redis.call('ZSCORE', KEYS[1], id) then return 'gone' end
if redis.call('HEXISTS', data, ARGV[3]) == 1 then return 'ok' end
drop_those_that_are_over()
local more, most = tonumber(ARGV[5]), tonumber(ARGV[6])
if most > 0 and tonumber(redis.call('HGET', KEYS[2], TOTAL) or '0') + more > most then return 'full' end
redis.call('HSET', data, ARGV[3], ARGV[4])
redis.call('HINCRBY', KEYS[2], id, more)
redis.call('HINCRBY', KEYS[2], TOTAL, more)
keep(tonumber(ARGV[7]))
return 'ok'
