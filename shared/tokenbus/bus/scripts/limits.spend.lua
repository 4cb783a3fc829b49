-- Count bytes that stay on the server for a time.
-- KEYS
--   spent  hash rw
-- ARGV
--   size  in bytes
--   most  bytes of the bucket
--   period_ms  how long bytes stay
-- Reply: 0, or the ms after which there is room for them; nothing is counted then.
-- Atomic: several workers cannot share the last of it.
-- Twice: again: counted twice.
-- Uses: now_ms, whole, make_room
local now = now_ms()
local till = math.max(now, tonumber(redis.call('HGET', spent, 'till') or '0')) + size * period_ms / most
if till > now + period_ms then return math.ceil(till - now - period_ms) end
make_room(spent)
redis.call('HSET', spent, 'till', whole(till))
redis.call('PEXPIRE', spent, whole(till - now + 1))
return 0
