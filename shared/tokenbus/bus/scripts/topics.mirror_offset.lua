-- Show a group's offset to standard tools, with the number of entries read. Counts a part of those after it.
-- KEYS
--   lease  hash rw
--   stream  stream rw
-- ARGV
--   group
--   offset
--   after  where the count continues
--   counted  how many entries after the offset were counted before
-- Reply: where the next call continues, or '' if this was the last one; how many are counted.
-- Atomic: the number of added entries is of the moment in which the count reaches the stream's end.
-- Twice: same
-- Uses: by_name
-- Constants: COUNTED_ENTRIES, READ_BYTES
if redis.call('EXISTS', stream) == 0 then return {'', 0} end
local added = by_name(redis.call('XINFO', 'STREAM', stream))['entries-added']
if not added then return {'', 0} end
local read = redis.call('HGET', lease, 'entries')
if #redis.call('XRANGE', stream, '-', offset, 'COUNT', 1) == 0 then
  read = added - redis.call('XLEN', stream)
elseif not read then
  local bytes, most = 0, tonumber(counted) + COUNTED_ENTRIES
  counted = tonumber(counted)
  while true do
    if counted >= most or bytes >= READ_BYTES then return {after, counted} end
    -- One at a time, for each may be large.
    local entry = redis.call('XRANGE', stream, '(' .. after, '+', 'COUNT', 1)[1]
    if not entry then break end
    after, counted = entry[1], counted + 1
    for _, text in ipairs(entry[2]) do bytes = bytes + #text end
  end
  read = added - counted
end
redis.call('HSET', lease, 'entries', read)
redis.pcall('XGROUP', 'SETID', stream, group, offset, 'ENTRIESREAD', read)
return {'', 0}
