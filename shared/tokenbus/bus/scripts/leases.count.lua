-- Add 1 to a field of a lease, also on a full server.
-- KEYS
--   lease  hash rw
-- ARGV
--   field
-- Reply: the new value.
-- Atomic: as for `note`.
-- Twice: again: it counts tries of loads, one more makes the next owner more careful, and loses nothing.
-- Uses: make_room
make_room(lease)
return redis.call('HINCRBY', lease, field, 1)
