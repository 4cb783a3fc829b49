-- Reserve a call's capacity in all of its scopes, or in none.
-- KEYS
--   scopes...  hash rw + sorted set rw  of each scope its state and its running calls
-- ARGV
--   member  the call
--   worker
--   tokens
--   lease_ms
--   limits...  of each scope: requests a second, tokens a minute, calls at once
-- Reply: see `reserve`.
-- Atomic: several fetchers cannot share the last of a limit, and nothing is reserved in one scope alone.
-- Twice: again: 'already' if a scope limits concurrency; else a call that was not made is paid for until it refills.
-- Uses: now_us, whole, make_room
-- Constants: MINUTE_US, POLL_US, TICKET_US, MAX_PLACES
local now = now_us()
local refused, longest, states = {}, 0, {}
tokens = tonumber(tokens)
local function limits_of(s)
  local at = limits_at + 3 * (s - 1)
  return tonumber(ARGV[at]), tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
end
local function already()
  -- The present times stand for those of the lost reply: `refund` returns no more than what was left, up to now.
  local reply = {'already'}
  for k = scopes_at, #KEYS, 2 do reply[#reply + 1] = redis.call('HGET', KEYS[k], 'tokens') or '0' end
  return reply
end
for s = 1, #KEYS / 2 do
  local hash, held = KEYS[2 * s - 1], KEYS[2 * s]
  local rate, per_minute, most = limits_of(s)
  local h, places, gone = {}, {}, {}
  local flat = redis.call('HGETALL', hash)
  for i = 1, #flat, 2 do
    local name = string.match(flat[i], '^wait:(.*)$')
    if name then
      local since, till, need = string.match(flat[i + 1], '^(%d+) (%d+) (%d+)$')
      if tonumber(till) > now then places[name] = {tonumber(since), tonumber(need)} else gone[#gone + 1] = flat[i] end
    else h[flat[i]] = tonumber(flat[i + 1]) end
  end
  local since = places[worker] and places[worker][1] or now
  local before, before_tokens = 0, 0
  for name, place in pairs(places) do
    if name ~= worker and place[1] < since then
      before, before_tokens = before + 1, before_tokens + place[2]
    end
  end
  local wait = math.max(0, (h.paused or 0) - now)
  local r, k = math.max(now, h.requests or 0), math.max(now, h.tokens or 0)
  if rate > 0 then
    wait = math.max(wait, r + (1 + before) / rate * 1000000 - now - math.max(1, rate) / rate * 1000000)
    r = r + 1000000 / rate
  end
  if per_minute > 0 then
    local over = k + (tokens + before_tokens) / per_minute * MINUTE_US - now - MINUTE_US
    -- A request larger than the bucket starts when the bucket is full, and leaves it in debt.
    if before == 0 then over = math.min(over, k - now) end
    wait = math.max(wait, over)
    k = k + tokens / per_minute * MINUTE_US
  end
  if most > 0 then
    local score = redis.call('ZSCORE', held, member)
    if score and tonumber(score) > now then return already() end
    if redis.call('ZCOUNT', held, '(' .. whole(now), '+inf') + before >= most then wait = math.max(wait, POLL_US) end
  end
  if wait > 0 then
    refused[#refused + 1] = s
    if wait > longest then longest = wait end
  end
  states[s] = {hash, held, r, k, h.paused or 0, gone, since}
end
make_room(KEYS[scopes_at])
for _, state in ipairs(states) do
  if #state[6] > 0 then redis.call('HDEL', state[1], unpack(state[6], 1, math.min(#state[6], 1000))) end
end
if #refused > 0 then
  for _, s in ipairs(refused) do
    local hash = states[s][1]
    local place = 'wait:' .. worker
    if redis.call('HLEN', hash) < MAX_PLACES or redis.call('HEXISTS', hash, place) == 1 then
      redis.call('HSET', hash, place, whole(states[s][7]) .. ' ' .. whole(now + TICKET_US) .. ' ' .. tokens)
    end
    redis.call('PEXPIRE', hash, math.max(redis.call('PTTL', hash), TICKET_US / 1000))
  end
  return {'wait', refused[1], math.ceil(longest / 1000)}
end
local reply = {'ok'}
for s, state in ipairs(states) do
  local hash, held, r, k, paused = unpack(state, 1, 5)
  local rate, per_minute, most = limits_of(s)
  redis.call('HDEL', hash, 'wait:' .. worker)
  if rate > 0 then redis.call('HSET', hash, 'requests', whole(r)) end
  if per_minute > 0 then redis.call('HSET', hash, 'tokens', whole(k)) end
  redis.call('PEXPIRE', hash, whole((math.max(r, k, paused) - now) / 1000 + TICKET_US / 1000))
  if most > 0 then
    redis.call('ZREMRANGEBYSCORE', held, '-inf', whole(now))
    redis.call('ZADD', held, whole(now + lease_ms * 1000), member)
    redis.call('PEXPIRE', held, lease_ms)
  end
  reply[s + 1] = whole(k)
end
return reply
