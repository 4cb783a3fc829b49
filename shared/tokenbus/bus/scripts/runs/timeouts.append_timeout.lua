-- Append a timeout to the events of a run.
-- KEYS
--   run_key  hash rw
--   events  stream w
--   parser_lease  hash w
-- ARGV
--   run
--   frame  event
--   only_if  what the hash must say: 'open' (or it is gone), 'abandoned' (anything but open), 'ended', 'not ended'
-- Reply: 1, or 0 if the hash forbids it.
-- Atomic: the event and the count of its bytes are written together, and only while the hash allows it.
-- Twice: again: the parser finds that the second does not apply.
-- Uses: make_room, append_input
local status = redis.call('HGET', run_key, 'status')
local ended = status == 'completed' or status == 'incomplete' or status == 'failed' or status == 'cancelled'
if only_if == 'ended' or only_if == 'not ended' then
  if ended ~= (only_if == 'ended') then return 0 end
elseif only_if == 'abandoned' then
  if status == 'open' then return 0 end
elseif status and status ~= 'open' then
  return 0
end
make_room(run_key)
append_input(run_key, events, parser_lease, run, frame)
return 1
