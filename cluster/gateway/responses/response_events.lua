-- Returns the state of a background response, the number of its events so far, and its next batches, each behind its
-- number: some 256 KiB at most, and at least one. After response_state.lua.
--
-- KEYS: its state, its events. ARGV: the number of the first batch that is wanted.
local state = state_after(KEYS[1], 'look', 0)
local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
local answer, bytes = {state, last and last[1] or '0-0'}, 0
for _, entry in ipairs(redis.call('XRANGE', KEYS[2], ARGV[1], '+', 'COUNT', 64)) do
  if bytes > 0 and bytes + #entry[2][2] > 262144 then break end
  bytes = bytes + #entry[2][2]
  answer[#answer + 1] = entry[1]
  answer[#answer + 1] = entry[2][2]
end
return answer
