-- Read the state of a partition's policy stage.
-- KEYS
--   policy_lease  hash r
-- ARGV
-- Reply: whether a worker owns it, its unread bytes, its offset.
-- Atomic: the lease is compared with the server's own clock.
-- Twice: reads
-- Uses: now_ms
local h = redis.call('HMGET', policy_lease, 'owner', 'until', 'arrived', 'done', 'offset')
local alive = h[1] and tonumber(h[2] or '0') > now_ms() and 1 or 0
return {alive, tonumber(h[3] or '0') - tonumber(h[4] or '0'), h[5] or '0-0'}
