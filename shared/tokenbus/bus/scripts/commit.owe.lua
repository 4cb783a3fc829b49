-- Store one part of a large commit, before the commit.
-- KEYS
--   lease  hash rw
--   owed  hash w  what the partition owes
-- ARGV
--   token
--   name  field
--   part
--   ttl_ms  lifetime
-- Reply: 1, or 0 if another token holds the lease.
-- Atomic: only the owner of the lease writes, and nothing is left without a lifetime.
-- Twice: same
-- Uses: make_room
if redis.call('HGET', lease, 'token') ~= token then return 0 end
make_room(lease)
redis.call('HSET', owed, name, part)
redis.call('PEXPIRE', owed, ttl_ms)
return 1
