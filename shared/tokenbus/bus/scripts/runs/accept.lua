-- Create a run: its hash, its first event, its first turn.
-- KEYS
--   run_key  hash rw
--   events  stream w
--   turns  stream w
--   parser_lease  hash rw
--   log  stream w
--   parent_key  hash rw  of the run whose call begins this one, or the run's own again
--   open_runs  sorted set w
--   ended_runs  sorted set w
--   of_tenant...  sorted set rw + sorted set w  of a run with a tenant, the tenant's open runs and its ended ones
-- ARGV
--   run
--   ttl_ms  lifetime
--   frame  first event
--   work  first turn or ''
--   accepted_ms  time of acceptance
--   epoch
--   parent_call  field of that call or ''
--   parent_child  field that says that its run was accepted
--   fields...  of the hash
-- Reply: 'new', the status of the run that is there, 'stale', or 'orphan' if the parent's call waits for no run.
-- Atomic: a request that is delivered twice creates one run, and a cancel that came first takes effect.
-- Twice: refused: the status of the run that is there.
-- Uses: begin_run, no_room
-- Constants: RUNS_SHARE, SMALL_FRAME
local h = redis.call('HMGET', run_key, 'status', 'cancel')
if h[1] and h[1] ~= 'awaited' then return h[1] end
local later = redis.call('HGET', parser_lease, 'epoch')
if later and tonumber(later) > tonumber(epoch) then return 'stale' end
if parent_call ~= '' then
  local parent = redis.call('HMGET', parent_key, 'status', parent_call, parent_child)
  if parent[1] ~= 'open' or not parent[2] or parent[3] then return 'orphan' end
end
-- A refused request's run ends at once, and needs no room. One without a turn may have all its events here.
local full = (work ~= '' or #frame > SMALL_FRAME) and no_room()
if full then return full end
local keys = {run_key = run_key, events = events, turns = turns, parser_lease = parser_lease, log = log,
              open_runs = open_runs, ended_runs = ended_runs,
              tenants_open = KEYS[of_tenant_at], tenants_ended = KEYS[of_tenant_at + 1]}
begin_run(keys, run, frame, work, h[1] and h[2], {unpack(ARGV, fields_at)}, accepted_ms, ttl_ms)
if parent_call ~= '' then redis.call('HSET', parent_key, parent_child, 1) end
return 'new'
