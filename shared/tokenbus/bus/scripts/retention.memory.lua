-- Read how full a node is.
-- KEYS
--   key  any r  any key of the node
-- ARGV
-- Reply: memory in use, in thousandths of what the node may use; 0 if it has no limit.
-- Atomic: both numbers are of one moment.
-- Twice: reads
local found = redis.call('INFO', 'memory')
local used = tonumber(string.match(found, 'used_memory:(%d+)'))
local most = tonumber(string.match(found, 'maxmemory:(%d+)') or '0')
return most > 0 and math.floor(used * 1000 / most) or 0
