-- Read how full a node is.
-- KEYS
--   key  any r  any key of the node
-- ARGV
-- Reply: bytes in use, bytes at most (0: no limit).
-- Atomic: both numbers are of the same moment.
-- Twice: reads
local found = redis.call('INFO', 'memory')
return {tonumber(string.match(found, 'used_memory:(%d+)')), tonumber(string.match(found, 'maxmemory:(%d+)') or '0')}
