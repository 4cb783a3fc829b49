-- Read the names of an entry's fields, cut to a length, and the sizes of their values.
-- KEYS
--   stream  stream r
-- ARGV
--   entry  its id
-- Reply: name and size of each field.
-- Atomic: not needed; a script, because the entry is too large or too broken to be sent.
-- Twice: reads
-- Constants: NAME_BYTES
local found, sizes = redis.call('XRANGE', stream, entry, entry)[1], {}
for i = 1, found and #found[2] or 0, 2 do
  sizes[#sizes + 1] = string.sub(found[2][i], 1, NAME_BYTES)
  sizes[#sizes + 1] = #found[2][i + 1]
end
return sizes
