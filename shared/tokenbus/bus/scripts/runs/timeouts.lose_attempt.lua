-- Close an attempt whose work is in no queue.
-- KEYS
--   run_key  hash rw
--   raw  stream w
--   control  stream w
--   normalizer_lease  hash w
-- ARGV
--   run
--   attempt
--   frame  what ends the attempt in raw
--   control_frame
-- Reply: 'lost', 'closed', 'gone', the run's status, or 'attempt N'.
-- Atomic: an attempt that ends meanwhile is not closed a second time.
-- Twice: refused: 'closed'
-- Uses: make_room, append_frame
local h = redis.call('HMGET', run_key, 'status', 'attempt', 'closed')
if not h[1] then return 'gone' end
if h[1] ~= 'open' then return h[1] end
if h[2] ~= attempt then return 'attempt ' .. (h[2] or '') end
if h[3] == h[2] then return 'closed' end
make_room(run_key)
redis.call('XADD', control, 'MAXLEN', '~', 1000, '*', run, control_frame)
append_frame(raw, normalizer_lease, run, frame)
redis.call('HSET', run_key, 'closed', attempt)
return 'lost'
