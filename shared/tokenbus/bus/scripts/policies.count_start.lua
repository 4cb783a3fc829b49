-- Set how many starts failed by a policy, and the last place of a failure.
-- KEYS
--   run_key  hash rw
--   policy_lease  hash r
-- ARGV
--   token
--   count_field
--   starts  the count
--   place_field
--   failed_at  the place
-- Reply: count and place; or as `policy_starts`.
-- Atomic: as for `note`; the place never goes back.
-- Twice: same
-- Uses: refusal_of_judge, make_room
local refused = refusal_of_judge(run_key, policy_lease, token)
if refused then return refused end
make_room(run_key)
redis.call('HSET', run_key, count_field, starts)
local at, before = tonumber(failed_at), tonumber(redis.call('HGET', run_key, place_field) or '0')
if at > before then
  redis.call('HSET', run_key, place_field, at)
  before = at
end
return {tonumber(starts), before}
