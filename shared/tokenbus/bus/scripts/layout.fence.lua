-- Refuse runs of an earlier epoch in a partition.
-- KEYS
--   parser_lease  hash rw
-- ARGV
--   epoch
-- Reply: 1.
-- Atomic: an epoch never goes back.
-- Twice: same
-- Uses: make_room
local known = redis.call('HGET', parser_lease, 'epoch')
make_room(parser_lease)
if not known or tonumber(known) < tonumber(epoch) then redis.call('HSET', parser_lease, 'epoch', epoch) end
return 1
