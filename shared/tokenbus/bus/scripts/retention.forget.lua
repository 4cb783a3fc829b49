-- Delete ended runs before their time.
-- KEYS
--   ended_runs  sorted set rw
--   keys...  hash rw + stream w  of each run: its hash and its log
-- ARGV
--   runs...
-- Reply: how many were deleted.
-- Atomic: a run that is accepted again under its id meanwhile keeps its keys.
-- Twice: same
local ended = {completed = true, incomplete = true, failed = true, cancelled = true}
local done = 0
for i = runs_at, #ARGV do
  local k = keys_at + 2 * (i - runs_at)
  local status = redis.pcall('HGET', KEYS[k], 'status')
  if type(status) == 'string' and ended[status] then
    redis.call('UNLINK', KEYS[k], KEYS[k + 1])
    done = done + 1
  end
  redis.pcall('ZREM', ended_runs, ARGV[i])
end
return done
