-- Create a run: its hash, its first event, its first turn.
-- KEYS
--   run_key  hash rw
--   events  stream w
--   turns  stream w
--   parser_lease  hash rw
--   log  stream w
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
--   fields...  of the hash
-- Reply: 'new', the status of the run that is there, or 'stale'.
-- Atomic: a request that is delivered twice creates one run, and a cancel that came first takes effect.
-- Twice: refused: the status of the run that is there.
-- Uses: append_frame, list_of_tenant
-- Constants: RUNS_SHARE
local h = redis.call('HMGET', run_key, 'status', 'cancel')
if h[1] and h[1] ~= 'awaited' then return h[1] end
local later = redis.call('HGET', parser_lease, 'epoch')
if later and tonumber(later) > tonumber(epoch) then return 'stale' end
if work ~= '' then
  local memory = redis.call('INFO', 'memory')
  local used, most = string.match(memory, 'used_memory:(%d+)'), string.match(memory, 'maxmemory:(%d+)')
  if tonumber(most or '0') > 0 and tonumber(used) > tonumber(most) * RUNS_SHARE then
    return redis.error_reply('OOM no room for further runs: what is left is for those that are open')
  end
end
redis.call('UNLINK', log)  -- a long one is freed outside the script
append_frame(events, parser_lease, run, frame)
local status = 'open'
if h[1] then
  append_frame(events, parser_lease, run, h[2])
  redis.call('HDEL', run_key, 'cancel')
  status = 'cancelling'
elseif work ~= '' then
  redis.call('XADD', turns, '*', run, work)
end
redis.call('HSET', run_key, 'status', status, 'attempt', 1, 'raw', 0, 'seq', 0, 'accepted', accepted_ms,
           unpack(ARGV, fields_at))
redis.call('PEXPIRE', run_key, ttl_ms)
-- The index only serves to find runs. If it cannot be written (wrong type, no permission), the run is accepted anyway.
redis.pcall('ZADD', open_runs, accepted_ms, run)
redis.pcall('ZREM', ended_runs, run)
if KEYS[of_tenant_at] then
  list_of_tenant(KEYS[of_tenant_at], run, accepted_ms, ttl_ms)
  redis.pcall('ZREM', KEYS[of_tenant_at + 1], run)
end
return 'new'
