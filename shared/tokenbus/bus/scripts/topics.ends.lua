-- Read the last id of each stream.
-- KEYS
--   streams...  stream r
-- ARGV
-- Reply: the ids; 0-0 for an empty stream.
-- Atomic: all are of one moment.
-- Twice: reads
local ends = {}
for i, key in ipairs(KEYS) do
  local last = redis.call('XREVRANGE', key, '+', '-', 'COUNT', 1)
  ends[i] = last[1] and last[1][1] or '0-0'
end
return ends
