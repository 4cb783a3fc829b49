-- Find streams that were trimmed beyond a cursor.
-- KEYS
--   streams...  stream r
-- ARGV
--   cursors...  the cursor in each
-- Reply: for each stream '', or the oldest id that is left ('none': the stream is empty).
-- Atomic: nothing is trimmed between the checks of one stream.
-- Twice: reads
-- Uses: by_name
local function next_id(id)
  local ms, seq = string.match(id, '^(%d+)-(%d+)$')
  if seq == '18446744073709551615' then return string.format('%.0f-0', ms + 1) end
  return ms .. '-' .. string.format('%.0f', seq + 1)
end
local lost = {}
for i, key in ipairs(KEYS) do
  local cursor, kept = ARGV[cursors_at + i - 1], nil
  if cursor == '0-0' then
    local added = redis.call('EXISTS', key) == 1 and by_name(redis.call('XINFO', 'STREAM', key))['entries-added']
    kept = not added or added == redis.call('XLEN', key)
  else
    kept = #redis.call('XRANGE', key, '-', cursor, 'COUNT', 1) > 0
  end
  local first = not kept and redis.call('XRANGE', key, '-', '+', 'COUNT', 1)
  local oldest = first and (first[1] and first[1][1] or 'none') or ''
  lost[i] = oldest ~= next_id(cursor) and oldest or ''
end
return lost
