-- Read a run's failed starts, and record that this worker judges the run.
-- KEYS
--   run_key  hash rw
--   policy_lease  hash r
-- ARGV
--   token
--   fields...  fields to read
-- Reply: their values; or why not: 'fenced', 'gone', or the run's status.
-- Atomic: the worker before counts as lost once, however many workers look.
-- Twice: same
-- Uses: refusal_of_judge, make_room
-- Constants: AT
local refused = refusal_of_judge(run_key, policy_lease, token)
if refused then return refused end
local place, last = string.match(redis.call('HGET', run_key, AT) or '', '^(%a+) (.+)$')
if last ~= token then
  make_room(run_key)
  if last and last ~= redis.call('HGET', policy_lease, 'released') then
    redis.call('HINCRBY', run_key, 'workers_lost:' .. place, 1)
  end
  redis.call('HSET', run_key, AT, 'beside ' .. token)
end
return redis.call('HMGET', run_key, unpack(ARGV, fields_at))
