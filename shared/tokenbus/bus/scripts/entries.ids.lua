-- Read the ids of entries without their content, as far as the server may read that at once.
-- KEYS
--   stream  stream r
-- ARGV
--   after  id before the first
--   last  id
--   count  most ids
-- Reply: the ids.
-- Atomic: not needed; as for `field_sizes`.
-- Twice: reads
-- Constants: READ_BYTES
local ids, bytes = {}, 0
while #ids < tonumber(count) and bytes < READ_BYTES do
  -- One at a time, for each may be large.
  local entry = redis.call('XRANGE', stream, '(' .. after, last, 'COUNT', 1)[1]
  if not entry then break end
  after = entry[1]
  ids[#ids + 1] = after
  for _, text in ipairs(entry[2]) do bytes = bytes + #text end
end
return ids
