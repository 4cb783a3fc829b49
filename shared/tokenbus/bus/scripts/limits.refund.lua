-- End a call: free its slots, and return what it did not use.
-- KEYS
--   scopes...  hash rw + sorted set w  of each scope its state and its running calls
-- ARGV
--   member  the call
--   left  unused tokens
--   taken...  of each scope: tokens a minute, time up to which the call's tokens were taken
-- Reply: 1.
-- Atomic: a reservation that comes meanwhile does not lose the refund.
-- Twice: again: the unused tokens are returned twice; it is sent once.
-- Uses: now_us, whole
-- Constants: MINUTE_US, TICKET_US
local now = now_us()
left = tonumber(left)
for s = 1, #KEYS / 2 do
  local hash, held = KEYS[2 * s - 1], KEYS[2 * s]
  redis.call('ZREM', held, member)
  local at = taken_at + 2 * (s - 1)
  local per_minute, until_us = tonumber(ARGV[at]), tonumber(ARGV[at + 1])
  local k = tonumber(redis.call('HGET', hash, 'tokens') or '0')
  if per_minute > 0 and left ~= 0 then
    local part = left / per_minute * MINUTE_US
    -- Capacity that has refilled since is not returned a second time.
    if part > 0 then k = k - math.min(part, math.max(0, until_us - now)) else k = math.max(now, k) - part end
    redis.call('HSET', hash, 'tokens', whole(k))
    redis.call('PEXPIRE', hash, math.max(redis.call('PTTL', hash), TICKET_US / 1000, math.ceil((k - now) / 1000)))
  end
end
return 1
