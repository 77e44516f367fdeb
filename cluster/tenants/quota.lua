-- Counts a tenant: the one script of quotas. ARGV[1]: a QuotaReport as JSON. Returns a QuotaVerdict as JSON (account.py).
--
-- Run once to admit a request, and by the heartbeat to report changes since. All of a tenant is in one hash and one
-- sorted set of a common hash tag, so the script is atomic on a cluster too:
--
--     requests, tokens, at_ms      token buckets: how full they were when; a minute's limit is size and rate per minute
--     n:G r:G u:G s:G              of gateway G: requests running, tokens reserved, budget tokens used, its last report
--     w:G                          of its requests that awaited an answer then: what was granted to them since (JSON)
--     budget, base                 which budget is counted; tokens used by gateways that are gone for a day
--     gateways zset                G to the end of its lease: after it n and r of G count as nothing, u still counts
--
-- What a gateway reports of itself is absolute, so a report may be lost, late or run twice; only bucket charges are
-- differences, and those a minute heals. It has reservations that were made, never those requested: calls come here in
-- any order, and requests that counted would shut each other out while places are free. A reservation counts at once,
-- until its gateway reports that it has the answer, or waits for it no more. A gateway that dies frees its concurrency
-- by the end of its lease.
local a = cjson.decode(ARGV[1])
local hash, leases, day = KEYS[1], KEYS[2], 86400000
local now = a.now_ms
if not now then
  local t = redis.call('TIME')
  now = t[1] * 1000 + math.floor(t[2] / 1000)
end
local h, flat = {}, redis.call('HGETALL', hash)
for i = 1, #flat, 2 do h[flat[i]] = flat[i + 1] end
local function num(field) return tonumber(h[field] or '0') or 0 end

local function level(field, cap, known, delta)
  if not cap then return nil end
  local v = tonumber(h[field] or '')
  if v then
    v = v + math.max(0, now - num('at_ms')) * cap / 60000
  else
    v, delta = known or cap, 0 -- what the gateway knows has its own charges in it
  end
  return math.max(-cap, math.min(cap, math.min(cap, v) + delta))
end
local requests = level('requests', a.requests_per_minute, a.known_requests, a.delta_requests)
local tokens = level('tokens', a.tokens_per_minute, a.known_tokens, a.delta_tokens)

local old = num('budget')
local counts_budget = a.budget_id >= old
if a.budget_id > old and old > 0 then
  for field in pairs(h) do
    if string.sub(field, 1, 2) == 'u:' then redis.call('HDEL', hash, field); h[field] = nil end
  end
  h.base = '0'
end
local base = num('base')
if not h.base then base = a.known_base end

local alive, running, reserved, spent, gone = 1, 0, 0, 0, 0
local listed = redis.call('ZRANGE', leases, 0, -1, 'WITHSCORES')
for i = 1, #listed, 2 do
  local g, ends = listed[i], tonumber(listed[i + 1])
  if g ~= a.gateway then
    if ends > now then
      alive = alive + 1
      running = running + num('n:' .. g)
      reserved = reserved + num('r:' .. g)
      spent = spent + num('u:' .. g)
    elseif ends + day > now then
      gone = gone + num('u:' .. g)
    else
      base = base + num('u:' .. g)
      redis.call('HDEL', hash, 'n:' .. g, 'r:' .. g, 'u:' .. g, 's:' .. g, 'w:' .. g)
      redis.call('ZREM', leases, g)
    end
  end
end

-- awaited: report number to tokens granted, false while there is no verdict
local mine, held, number = a.running, a.reserved, tostring(a.number)
local is_news = a.number > num('s:' .. a.gateway)
local before = h['w:' .. a.gateway] and cjson.decode(h['w:' .. a.gateway]) or {}
local awaited, used_here = before, a.used
if is_news then
  awaited = {}
  if a.admit then awaited[number] = false end
  for _, other in ipairs(a.awaited or {}) do
    local granted = before[tostring(other)] or false
    awaited[tostring(other)] = granted
    if granted then mine, held = mine + 1, held + granted end
  end
else
  mine, held = num('n:' .. a.gateway), num('r:' .. a.gateway)
  used_here = math.max(used_here, num('u:' .. a.gateway))
end

local reason, wait_ms = '', 0
local used = base + gone + spent + used_here
if a.admit and awaited[number] == nil then
  reason = 'concurrency' -- nobody hears this: its gateway goes on without an answer, or had it already
elseif a.admit and not awaited[number] then
  if a.token_budget and counts_budget and used >= a.token_budget then
    reason = 'budget'
  elseif a.token_budget and counts_budget and used + reserved + held >= a.token_budget then
    reason = 'budget_reserved'
  elseif a.concurrency and running + mine >= a.concurrency then
    reason = 'concurrency'
  elseif a.kv_tokens and reserved + held > 0 and reserved + held + a.need > a.kv_tokens then
    reason = 'kv_share'
  elseif requests and requests < 1 then
    reason, wait_ms = 'requests', (1 - requests) * 60000 / a.requests_per_minute
  elseif tokens and tokens < a.wanted then
    reason, wait_ms = 'tokens', (a.wanted - tokens) * 60000 / a.tokens_per_minute
  else
    if requests then requests = requests - 1 end
    if tokens then tokens = tokens - a.charge end
    mine, held, awaited[number] = mine + 1, held + a.need, a.need
  end
  if reason ~= '' then awaited[number] = nil end
end

local function put(field, value) redis.call('HSET', hash, field, string.format('%.17g', value)) end
put('at_ms', now)
put('base', base)
if requests then put('requests', requests) else redis.call('HDEL', hash, 'requests') end
if tokens then put('tokens', tokens) else redis.call('HDEL', hash, 'tokens') end
if counts_budget then put('budget', a.budget_id) end
put('n:' .. a.gateway, mine)
put('r:' .. a.gateway, held)
if next(awaited) then
  redis.call('HSET', hash, 'w:' .. a.gateway, cjson.encode(awaited))
else
  redis.call('HDEL', hash, 'w:' .. a.gateway)
end
if is_news then
  put('s:' .. a.gateway, a.number)
  if counts_budget then put('u:' .. a.gateway, a.used) end
end
redis.call('ZADD', leases, now + a.lease_ms, a.gateway)
redis.call('EXPIRE', hash, a.ttl_s)
redis.call('EXPIRE', leases, a.ttl_s)
return cjson.encode({ok = reason == '', reason = reason, wait_ms = wait_ms, requests = requests, tokens = tokens,
  gateways = alive, base = base + gone, used_elsewhere = base + gone + spent})
