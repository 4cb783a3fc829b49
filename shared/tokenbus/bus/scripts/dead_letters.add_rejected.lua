-- Add a refused request to the dead stream, and drop the oldest of its kind if they are too many.
-- KEYS
--   dead  stream w
--   rejected  list rw  ids of refused requests
-- ARGV
--   most  entries
--   most_rejected  refused requests
--   data  entry
-- Reply: the entry's id.
-- Atomic: list and stream always hold the same refused requests.
-- Twice: again: the request is in the dead stream twice.
-- Constants: DATA_FIELD
local over = redis.call('LLEN', rejected) + 1 - most_rejected
local id = redis.call('XADD', dead, 'MAXLEN', '~', most, '*', DATA_FIELD, data)
redis.call('RPUSH', rejected, id)
for _ = 1, math.min(over, 100) do
  redis.call('XDEL', dead, redis.call('LPOP', rejected))
end
return id
