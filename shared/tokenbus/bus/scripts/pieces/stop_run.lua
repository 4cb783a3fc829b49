-- Stop the writes of an open run and notify its workers. `h`: its status, attempt, closed and turn.
-- Uses: append_frame
local function stop_run(run_key, raw, normalizer_lease, control, run, control_frame, h, why, status)
  redis.call('XADD', control, 'MAXLEN', '~', 1000, '*', run, control_frame)
  if h[3] ~= h[2] then
    -- A RawFrame that ends the present attempt (see frames/raw.py): turn, attempt, any frame, no time, its one item.
    local turn, attempt = tonumber(h[4] or '0'), tonumber(h[2])
    append_frame(raw, normalizer_lease, run, cmsgpack.pack({turn, attempt, -1, 0, {{'lost', why}}}))
  end
  redis.call('HSET', run_key, 'status', status, 'closed', h[2])
  return status
end
