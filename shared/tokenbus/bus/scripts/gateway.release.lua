-- Hold nothing for a run any more.
-- KEYS
--   counted  hash rw  what was counted of the run
--   held  hash rw
--   ends  sorted set rw
-- ARGV
--   run
--   ended  1: the run has ended without being accepted; 0: it was not published, and may be under the same id
-- Reply: none.
-- Atomic: what is held, its sum, and when it expires change together.
-- Twice: same
-- Uses: holds
if ended == '1' then
  redis.call('HSET', counted, 'ended', 1)
  redis.call('HDEL', counted, 'hold')
end
if redis.call('HEXISTS', held, run) == 1 then set_hold(held, ends, run, 0) end
