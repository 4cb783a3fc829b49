-- Read one field of an entry.
-- KEYS
--   stream  stream r
-- ARGV
--   entry  its id
--   place  of the value in the entry
-- Reply: the value, or ''.
-- Atomic: not needed; as for `field_sizes`.
-- Twice: reads
local found = redis.call('XRANGE', stream, entry, entry)[1]
return found and found[2][tonumber(place)] or ''
