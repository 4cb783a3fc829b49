-- Release a lease.
-- KEYS
--   lease  hash rw
-- ARGV
--   token
-- Reply: 1, or 0 if another token holds it.
-- Atomic: a worker that lost the lease cannot release its successor's.
-- Twice: same
if redis.call('HGET', lease, 'token') ~= token then return 0 end
redis.call('HDEL', lease, 'owner', 'until')
redis.call('HSET', lease, 'released', token)
return 1
