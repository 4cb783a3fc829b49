-- Write one worker's heartbeat among the members of a group.
-- KEYS
--   members  sorted set rw  by the server's time
-- ARGV
--   member
--   ttl_ms  how long a heartbeat counts
-- Reply: the workers with a heartbeat that counts, at most MAX_VALUES of them.
-- Atomic: the reply has this worker and no expired one.
-- Twice: same: the heartbeat has the time of the later one.
-- Uses: now_ms
-- Constants: MAX_VALUES
local now = now_ms()
redis.call('ZREMRANGEBYSCORE', members, '-inf', now - ttl_ms)
redis.call('ZADD', members, now, member)
redis.call('PEXPIRE', members, 10 * ttl_ms)
return redis.call('ZRANGE', members, 0, MAX_VALUES - 1)
