-- Cancel a run.
-- KEYS
--   run_key  hash rw
--   events  stream w
--   raw  stream w
--   control  stream w
--   parser_lease  hash rw
--   normalizer_lease  hash w
-- ARGV
--   run
--   awaited_ms  how long a cancel waits for its run
--   frame  event
--   control_frame
--   epoch
-- Reply: 'cancelling', 'awaited', 'stale', or the status of a run that is not open.
-- Atomic: from the same moment the attempt can write no more, and each worker is notified.
-- Twice: same: a cancel that waits counts from the later one.
-- Uses: make_room, append_input, stop_run
local h = redis.call('HMGET', run_key, 'status', 'attempt', 'closed', 'turn')
local status = h[1]
make_room(run_key)
if not status then
  local later = redis.call('HGET', parser_lease, 'epoch')
  if later and tonumber(later) > tonumber(epoch) then return 'stale' end
end
if not status or status == 'awaited' then
  redis.call('HSET', run_key, 'status', 'awaited', 'cancel', frame)
  redis.call('PEXPIRE', run_key, awaited_ms)
  return 'awaited'
end
if status ~= 'open' then return status end
append_input(run_key, events, parser_lease, run, frame)
return stop_run(run_key, raw, normalizer_lease, control, run, control_frame, h, 'the run was cancelled', 'cancelling')
