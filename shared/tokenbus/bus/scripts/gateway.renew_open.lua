-- Keep the places of open answers.
-- KEYS
--   answers  sorted set rw  open answers
-- ARGV
--   lease_ms
--   places...
-- Reply: none.
-- Atomic: places and the key's lifetime are extended together.
-- Twice: same: the places count from the later one.
-- Uses: now_ms, whole
local till = whole(now_ms() + tonumber(lease_ms))
for i = places_at, #ARGV do redis.call('ZADD', answers, 'XX', till, ARGV[i]) end
redis.call('PEXPIRE', answers, 2 * tonumber(lease_ms))
