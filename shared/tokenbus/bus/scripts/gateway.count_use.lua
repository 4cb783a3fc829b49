-- Add what a run used since the last count to its client's spend, and hold back that much less for it.
-- KEYS
--   counted  hash rw  what was counted of the run
--   spend  hash rw
--   use  hash rw  rates
--   held  hash rw  what is held back for open runs
--   ends  sorted set rw  when that expires
-- ARGV
--   run
--   seq  of the event
--   keep_ms  lifetime of the count
--   tokens_per_minute
--   price_name
--   ended  whether the run has ended: 1 or 0
--   counts...  four counts, then their four prices
-- Reply: 1, or 0 if this event was counted before.
-- Atomic: an event counts once, however many gateways report it.
-- Twice: refused: 0
-- Uses: now_ms, whole, buckets, holds
local now, tpm = now_ms(), tonumber(tokens_per_minute)
local before = redis.call('HMGET', counted, 'seq', 'u1', 'u2', 'u3', 'u4')
if before[1] and tonumber(before[1]) >= tonumber(seq) then return 0 end
local new, cost, most = {}, 0, 1e15 -- whole numbers of that size add up without an error
for i = 1, 4 do
  local was, is = tonumber(before[i + 1] or '0'), tonumber(ARGV[counts_at + i - 1])
  new[i] = math.min(most, math.max(0, is - was))
  cost = cost + new[i] * tonumber(ARGV[counts_at + 3 + i])
  redis.call('HSET', counted, 'u' .. i, whole(math.max(was, is)))
end
redis.call('HSET', counted, 'seq', seq)
redis.call('PEXPIRE', counted, keep_ms)
cost = whole(math.min(most, cost))
local hold = tonumber(redis.call('HGET', counted, 'hold') or '0')
hold = ended == '1' and 0 or math.max(0, hold - tonumber(cost))
redis.call('HSET', counted, 'hold', whole(hold))
if ended == '1' then redis.call('HSET', counted, 'ended', 1) end
if redis.call('HEXISTS', held, run) == 1 then set_hold(held, ends, run, hold) end
local input, output = whole(new[1] + new[2] + new[3]), whole(new[4])
local today = math.floor(now / 86400000)
if redis.call('HEXISTS', spend, string.format('%d:cost', today)) == 0 then
  -- A new day: forget what is older than a year.
  for _, field in ipairs(redis.call('HKEYS', spend)) do
    local day = string.match(field, '^(%d+):')
    if day and tonumber(day) < today - 366 then redis.call('HDEL', spend, field) end
  end
end
for _, span in ipairs({string.format('%d', today), 'total'}) do
  redis.call('HINCRBY', spend, span .. ':cost', cost)
  redis.call('HINCRBY', spend, span .. ':input', input)
  redis.call('HINCRBY', spend, span .. ':output', output)
  if ended == '1' then redis.call('HINCRBY', spend, span .. ':runs', 1) end
end
if price_name ~= '' and cost ~= '0' then redis.call('HINCRBY', spend, 'price:' .. price_name .. ':cost', cost) end
if tpm > 0 then
  set_level(use, 'tokens', tpm, level(use, 'tokens', tpm, now) - new[1] - new[2] - new[3] - new[4], now)
end
return 1
