-- Hold what is reserved for a run, for longer, also if that has expired; nothing for one that has ended.
-- KEYS
--   counted  hash rw  what was counted of the run
--   held  hash rw
--   ends  sorted set rw
-- ARGV
--   run
--   keep_ms  how long
-- Reply: 1 if something is held, else 0.
-- Atomic: what is held, its sum, and when it expires change together, and not after the run's end was counted.
-- Twice: same: it is held for as long from the second time.
-- Uses: now_ms, holds
local known = redis.call('HMGET', counted, 'ended', 'hold')
local amount = tonumber(known[2] or '0')
if known[1] or amount <= 0 then return 0 end
set_hold(held, ends, run, amount, now_ms() + tonumber(keep_ms))
keep_holds(held, ends, keep_ms)
redis.call('PEXPIRE', counted, keep_ms)
return 1
