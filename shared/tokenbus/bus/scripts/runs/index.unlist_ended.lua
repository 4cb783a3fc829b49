-- Remove runs from the index of open runs that are unknown or have ended.
-- KEYS
--   open_runs  sorted set w
--   ended_runs  sorted set rw
--   away  sorted set rw  of runs that are put away
--   run_keys...  hash rw
-- ARGV
--   keep_ms  how long ended runs are listed
--   runs...
-- Reply: how many were removed.
-- Atomic: a run that is accepted meanwhile stays listed.
-- Twice: same
-- Uses: now_ms, index_ended
local now = now_ms()
local ended = {completed = true, incomplete = true, failed = true, cancelled = true}
local done = 0
for k = run_keys_at, #KEYS do
  local run = ARGV[runs_at + k - run_keys_at]
  local status = redis.pcall('HGET', KEYS[k], 'status')
  if not status or status == 'awaited' or type(status) == 'table' then
    redis.pcall('ZREM', open_runs, run)
    done = done + 1
  elseif ended[status] then
    redis.pcall('HSETNX', KEYS[k], 'ended', now)
    local at = tonumber(redis.call('HGET', KEYS[k], 'ended')) or now  -- a full server may have refused it
    index_ended(open_runs, ended_runs, run, tonumber(keep_ms), at)
    done = done + 1
  elseif redis.call('HEXISTS', KEYS[k], 'away') == 1 then
    -- If that index was lost, the run must be back now.
    redis.pcall('ZADD', away, 'NX', now, run)
    if redis.pcall('PTTL', away) == -1 then redis.pcall('PEXPIRE', away, keep_ms) end
  end
end
return done
