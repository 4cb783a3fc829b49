-- Create a run with its first event and, unless `work` is empty, its first turn, and list it as open. `keys`: by name,
-- as `accept` has them. `cancel`: the frame of a cancel that came before the run.
-- Uses: append_frame, list_of_tenant
local function begin_run(keys, run, frame, work, cancel, fields, accepted_ms, ttl_ms)
  redis.call('UNLINK', keys.log)  -- a long one is freed outside the script
  append_frame(keys.events, keys.parser_lease, run, frame)
  local status = 'open'
  if cancel then
    append_frame(keys.events, keys.parser_lease, run, cancel)
    redis.call('HDEL', keys.run_key, 'cancel')
    status = 'cancelling'
  elseif work ~= '' then
    redis.call('XADD', keys.turns, '*', run, work)
  end
  redis.call('HSET', keys.run_key, 'status', status, 'attempt', 1, 'raw', 0, 'seq', 0, 'accepted', accepted_ms,
             unpack(fields))
  redis.call('PEXPIRE', keys.run_key, ttl_ms)
  -- The index only serves to find runs. If it cannot be written (wrong type, no permission), the run begins anyway.
  redis.pcall('ZADD', keys.open_runs, accepted_ms, run)
  redis.pcall('ZREM', keys.ended_runs, run)
  if keys.tenants_open and keys.tenants_open ~= keys.open_runs then
    list_of_tenant(keys.tenants_open, run, accepted_ms, ttl_ms)
    redis.pcall('ZREM', keys.tenants_ended, run)
  end
end
