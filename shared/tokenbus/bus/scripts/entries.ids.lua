-- Read the ids of entries without their content.
-- KEYS
--   stream  stream r
-- ARGV
--   after  id before the first
--   last  id
--   count  most ids
-- Reply: the ids.
-- Atomic: not needed; as for `field_sizes`.
-- Twice: reads
local ids = redis.call('XRANGE', stream, '(' .. after, last, 'COUNT', count)
for i = 1, #ids do ids[i] = ids[i][1] end
return ids
