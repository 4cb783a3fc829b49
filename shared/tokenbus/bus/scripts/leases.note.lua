-- Set a field of a lease, also on a full server.
-- KEYS
--   lease  hash w
-- ARGV
--   field
--   value
-- Reply: 1 if the field is new, else 0.
-- Atomic: `make_room` and the write must be one script to pass a full server's check.
-- Twice: same: nobody reads the reply.
-- Uses: make_room
make_room(lease)
return redis.call('HSET', lease, field, value)
