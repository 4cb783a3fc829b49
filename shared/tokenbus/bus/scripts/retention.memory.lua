-- Read how full a node is.
-- KEYS
--   key  any r  any key of the node
-- ARGV
--   share
--   most
-- Reply: memory in use, in thousandths of what it may use, the least of this share and these bytes; 0 if neither
--   is a bound.
-- Atomic: both numbers are of one moment.
-- Twice: reads
local found = redis.call('INFO', 'memory')
local used = tonumber(string.match(found, 'used_memory:(%d+)'))
local limit = tonumber(string.match(found, 'maxmemory:(%d+)') or '0') * tonumber(share)
local bound = tonumber(most)
if bound == 0 or (limit > 0 and limit < bound) then bound = limit end
return bound > 0 and math.floor(used * 1000 / bound) or 0
