-- Show a group's offset to standard tools, with the number of entries read.
-- KEYS
--   lease  hash rw
--   stream  stream rw
-- ARGV
--   group
--   offset
-- Reply: 1, or 0 if the stream is missing or the server does not count entries.
-- Atomic: length and number of added entries are of one moment.
-- Twice: same
-- Uses: by_name
if redis.call('EXISTS', stream) == 0 then return 0 end
local added = by_name(redis.call('XINFO', 'STREAM', stream))['entries-added']
if not added then return 0 end
local read = redis.call('HGET', lease, 'entries')
if #redis.call('XRANGE', stream, '-', offset, 'COUNT', 1) == 0 then
  read = added - redis.call('XLEN', stream)
elseif not read then
  read = added - #redis.call('XRANGE', stream, '(' .. offset, '+')
end
redis.call('HSET', lease, 'entries', read)
redis.pcall('XGROUP', 'SETID', stream, group, offset, 'ENTRIESREAD', read)
return 1
