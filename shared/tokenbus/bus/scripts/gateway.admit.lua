-- Admit a request if no limit of its client is reached, and hold back what it may cost.
-- KEYS
--   use  hash rw  rates
--   answers  sorted set rw  open answers
--   spend  hash rw
--   counted  hash rw  what was counted of the run
--   held  hash rw  what is held back for open runs
--   ends  sorted set rw  when that expires
-- ARGV
--   run  the name under which something is held for it
--   rpm  requests a minute
--   tpm  tokens a minute
--   most  open answers
--   place  of the answer: the run at a gateway
--   budget
--   period  of the budget
--   lease_ms  of an answer
--   client
--   estimate  what the run may cost
--   hold_ms  how long that is held for a run that does not start
--   keep_ms  lifetime of what is known of the run
--   above...  of a child run, the reservations of the runs above it
-- Reply: see `AdmissionReply`.
-- Atomic: requests that come at once, at several gateways, cannot share the last place.
-- Twice: again: it takes two requests of the minute, but for a child run one.
-- Uses: now_ms, whole, buckets, holds
-- Constants: MAX_VALUES
local now = now_ms()
rpm, tpm, most, budget, lease_ms = tonumber(rpm), tonumber(tpm), tonumber(most), tonumber(budget), tonumber(lease_ms)
local function spent()
  if period == '' then return tonumber(redis.call('HGET', spend, 'total:cost') or '0') end
  local today = math.floor(now / 86400000)
  local first = today
  if period == 'week' then
    first = today - (today + 3) % 7
  elseif period == 'month' then
    -- The day of the month, from the days since 0000-03-01: https://howardhinnant.github.io/date_algorithms.html
    local z = today + 719468
    local doe = z - math.floor(z / 146097) * 146097
    local leaps = math.floor(doe / 1460) - math.floor(doe / 36524) + math.floor(doe / 146096)
    local yoe = math.floor((doe - leaps) / 365)
    local doy = doe - (365 * yoe + math.floor(yoe / 4) - math.floor(yoe / 100))
    local mp = math.floor((5 * doy + 2) / 153)
    first = today - (doy - math.floor((153 * mp + 2) / 5))
  end
  local fields, sum = {}, 0
  for day = first, today do fields[#fields + 1] = string.format('%d:cost', day) end
  for _, cost in ipairs(redis.call('HMGET', spend, unpack(fields))) do sum = sum + (tonumber(cost) or 0) end
  return sum
end
local refused, retry, requests, tokens, cost = '', 0, -1, -1, 0
local own, known = 0, {}
local child = ARGV[above_at] ~= nil
if child and redis.call('HGET', counted, 'client') == client then return {'', 0, -1, 0, -1, 0, 0} end
if budget > 0 then
  cost = spent()
  for _, expired in ipairs(redis.call('ZRANGEBYSCORE', ends, '-inf', whole(now), 'LIMIT', 0, 100)) do
    set_hold(held, ends, expired, 0)
  end
  own = tonumber(redis.call('HGET', held, run) or '0')
  if child then
    -- The runs above wait for this one: what is held for them must not refuse it.
    for _, amount in ipairs(redis.call('HMGET', held, unpack(ARGV, above_at))) do
      own = own + (tonumber(amount) or 0)
    end
  end
  known = redis.call('HMGET', counted, 'client', 'ended', 'hold')
  if cost >= budget then
    refused = 'budget'
  elseif cost + held_in_all(held) - own >= budget then
    refused, retry = 'reserved', 1000
  end
end
if rpm > 0 then
  requests = level(use, 'requests', rpm, now)
  if refused == '' and requests < 1 then refused, retry = 'requests', math.ceil((1 - requests) * 60000 / rpm) end
end
if tpm > 0 then
  tokens = level(use, 'tokens', tpm, now)
  if refused == '' and tokens <= 0 then refused, retry = 'tokens', math.ceil((1 - tokens) * 60000 / tpm) end
end
if most > 0 then
  local gone = redis.call('ZRANGEBYSCORE', answers, '-inf', whole(now), 'LIMIT', 0, MAX_VALUES)
  if #gone > 0 then redis.call('ZREM', answers, unpack(gone)) end
  local runs, joins, seen = redis.call('ZCARD', answers), false, {}
  if runs >= most then
    -- A run that is read at several gateways has a place of each, and counts once. Beyond MAX_VALUES, each place
    -- counts.
    joins = redis.call('ZSCORE', answers, place)
    for _, one in ipairs(redis.call('ZRANGE', answers, 0, MAX_VALUES - 1)) do
      local read = string.match(one, '^(.*) ')
      if read == string.match(place, '^(.*) ') then joins = true end
      if seen[read] then runs = runs - 1 else seen[read] = true end
    end
  end
  if refused == '' and not joins and runs >= most then refused, retry = 'concurrency', 1000 end
end
if refused == '' then
  if rpm > 0 then
    requests = requests - 1
    set_level(use, 'requests', rpm, requests, now)
  end
  if most > 0 then
    redis.call('ZADD', answers, whole(now + lease_ms), place)
    redis.call('PEXPIRE', answers, 2 * lease_ms)
  end
  if child and budget == 0 then
    redis.call('HSET', counted, 'client', client)
    redis.call('PEXPIRE', counted, keep_ms)
  end
  if budget > 0 and (child or own == 0) and not known[2] and (known[1] or client) == client then
    -- Neither held for it yet, nor ended, nor begun for another client.
    local amount = tonumber(known[3] or estimate)
    redis.call('HSET', counted, 'client', client, 'hold', whole(amount))
    redis.call('PEXPIRE', counted, keep_ms)
    set_hold(held, ends, run, amount, now + tonumber(hold_ms))
    keep_holds(held, ends, keep_ms)
  end
  redis.call('HSET', spend, 'used', whole(now))
end
local function full(left, limit)
  if limit == 0 then return 0 end
  return math.ceil((limit - left) * 60000 / limit)
end
return {refused, retry, math.floor(requests), full(requests, rpm), math.floor(math.max(tokens, tpm > 0 and 0 or -1)),
  full(tokens, tpm), whole(cost)}
