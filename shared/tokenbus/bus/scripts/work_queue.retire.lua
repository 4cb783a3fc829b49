-- Remove a consumer that holds nothing.
-- KEYS
--   stream  stream rw
-- ARGV
--   group
--   consumer
-- Reply: 1, or 0 if it holds entries.
-- Atomic: an entry that is delivered between the check and the removal would be lost.
-- Twice: same
local p = redis.pcall('XPENDING', stream, group, '-', '+', 1, consumer)
if p.err or p[1] then return 0 end
redis.call('XGROUP', 'DELCONSUMER', stream, group, consumer)
return 1
