-- Set a field of a run, for the worker that judges it.
-- KEYS
--   run_key  hash rw
--   policy_lease  hash r
-- ARGV
--   token
--   field
--   value
-- Reply: the value if it is a number, else 0; or as `policy_starts`.
-- Atomic: a worker that lost the partition writes nothing.
-- Twice: same
-- Uses: refusal_of_judge, make_room
local refused = refusal_of_judge(run_key, policy_lease, token)
if refused then return refused end
make_room(run_key)
redis.call('HSET', run_key, field, value)
return tonumber(value) or 0
