-- Block new calls of a scope for a time.
-- KEYS
--   scope  hash rw
-- ARGV
--   ms
-- Reply: 1.
-- Atomic: a shorter pause cannot replace a longer one.
-- Twice: same: the pause counts from the later one.
-- Uses: now_us, whole
local till = now_us() + ms * 1000
if tonumber(redis.call('HGET', scope, 'paused') or '0') < till then
  redis.call('HSET', scope, 'paused', whole(till))
  redis.call('PEXPIRE', scope, math.max(redis.call('PTTL', scope), tonumber(ms)))
end
return 1
