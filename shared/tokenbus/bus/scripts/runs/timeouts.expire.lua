-- End a run whose deadline has passed.
-- KEYS
--   run_key  hash rw
--   events  stream w
--   raw  stream w
--   control  stream w
--   parser_lease  hash w
--   normalizer_lease  hash w
-- ARGV
--   run
--   frame  event
--   control_frame
-- Reply: 'expiring', 'gone', or the status of a run that is not open.
-- Atomic: as for `cancel`.
-- Twice: refused: the status, or again 'gone': the parser ends a run once.
-- Uses: make_room, append_input, stop_run
local h = redis.call('HMGET', run_key, 'status', 'attempt', 'closed', 'turn')
if h[1] and h[1] ~= 'open' then return h[1] end
make_room(run_key)
append_input(run_key, events, parser_lease, run, frame)
if not h[1] then return 'gone' end
local why = 'the deadline of the run has passed'
return stop_run(run_key, raw, normalizer_lease, control, run, control_frame, h, why, 'expiring')
