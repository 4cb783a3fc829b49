-- Append a frame to the events of a run that exists. If the run is put away, its state goes before it.
-- Uses: append_frame
local function append_input(run_key, events, lease, run, frame)
  local away = redis.call('HGET', run_key, 'away')
  if away then
    append_frame(events, lease, run, away)
    redis.call('HDEL', run_key, 'away')
  end
  append_frame(events, lease, run, frame)
end
