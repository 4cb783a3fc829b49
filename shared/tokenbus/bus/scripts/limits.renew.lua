-- Extend the slots of running calls. A slot that was freed stays free.
-- KEYS
--   held  sorted set rw  running calls of a scope
-- ARGV
--   lease_ms
--   members...  the calls
-- Reply: how many calls.
-- Atomic: the key cannot expire between the two, and all slots count from one moment.
-- Twice: same: the slots count from the later one.
-- Uses: now_us, whole
local till = whole(now_us() + lease_ms * 1000)
redis.call('PEXPIRE', held, lease_ms)
for i = members_at, #ARGV do redis.call('ZADD', held, 'XX', till, ARGV[i]) end
redis.call('PEXPIRE', held, lease_ms)
return #ARGV - members_at + 1
