-- Add a record to the index, and drop those that are too old or too many.
-- KEYS
--   index  sorted set rw  runs by time
--   entries  hash w  entries by run
-- ARGV
--   keep_ms  lifetime
--   most  maximum number of records
--   run  or ''
--   at_ms  its time
--   entry  its entry
-- Reply: how many were dropped.
-- Atomic: both keys always hold the same runs.
-- Twice: same: a record is replaced by itself; nobody needs the number.
-- Uses: now_ms
-- Constants: MAX_VALUES
local now = now_ms()
if run ~= '' then
  redis.call('ZADD', index, at_ms, run)
  redis.call('HSET', entries, run, entry)
end
local gone = redis.call('ZRANGEBYSCORE', index, '-inf', now - keep_ms, 'LIMIT', 0, MAX_VALUES)
local over = math.min(redis.call('ZCARD', index) - most, MAX_VALUES)
if over > #gone then gone = redis.call('ZRANGE', index, 0, over - 1) end
if #gone > 0 then
  redis.call('ZREM', index, unpack(gone))
  redis.call('HDEL', entries, unpack(gone))
end
redis.call('PEXPIRE', index, keep_ms)
redis.call('PEXPIRE', entries, keep_ms)
return #gone
