-- Add a refused request to the dead stream, and drop the oldest of its kind if they are too many.
-- KEYS
--   dead  stream w
--   rejected  list rw  ids of refused requests
--   added  any rw  what is left of an earlier try
-- ARGV
--   most  entries
--   most_rejected  refused requests
--   keep_ms  how long a later try finds that this one added the entry
--   data  entry
-- Reply: the entry's id, or '' if an earlier try added it.
-- Atomic: list and stream always hold the same refused requests.
-- Twice: refused: '', because of the mark.
-- Constants: DATA_FIELD
if redis.call('EXISTS', added) == 1 then return '' end
local over = redis.call('LLEN', rejected) + 1 - most_rejected
local id = redis.call('XADD', dead, 'MAXLEN', '~', most, '*', DATA_FIELD, data)
redis.call('RPUSH', rejected, id)
redis.call('SET', added, '', 'PX', keep_ms)
for _ = 1, math.min(over, 100) do
  redis.call('XDEL', dead, redis.call('LPOP', rejected))
end
return id
