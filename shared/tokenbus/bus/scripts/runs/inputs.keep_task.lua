-- Keep the name of the task that a call has become at its server, for the next worker of the call.
-- KEYS
--   run_key  hash rw
-- ARGV
--   call  field of the call
--   fence  value of that field
--   field  where the task is kept
--   task
-- Reply: 1, or 0 if the call is not open.
-- Atomic: no task is kept after the call's result.
-- Twice: same
-- Uses: make_room
local h = redis.call('HMGET', run_key, 'status', call)
if h[1] ~= 'open' or h[2] ~= fence then return 0 end
make_room(run_key)
redis.call('HSET', run_key, field, task)
return 1
