-- Let a group begin at the start of an added partition.
-- KEYS
--   lease  hash rw
-- ARGV
-- Reply: none.
-- Atomic: an offset that a worker has committed stays.
-- Twice: same
if redis.call('HSETNX', lease, 'offset', '0-0') == 1 then redis.call('HSET', lease, 'watermark', '0-0') end
