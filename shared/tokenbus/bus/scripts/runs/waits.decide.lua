-- Decide a wait of a run.
-- KEYS
--   run_key  hash rw
--   events  stream w
--   parser_lease  hash w
--   reply  any w  what became of the decision, for its sender
--   indexes...  sorted set w  of waits: of all, of the tenant
-- ARGV
--   run
--   wait
--   call  field of the call, if it waits in its worker: then its return ends the wait; else empty
--   frame  event; empty: nothing is decided, only told
--   fate  as JSON, if this decision counts
--   reply_ms  how long the reply is kept
-- Reply: what was written to `reply`.
-- Atomic: of any number of decisions, cancels and deadlines, one decides.
-- Twice: same
-- Uses: make_room, append_input, waits
-- Constants: MOST_FORGOTTEN
local h = redis.call('HMGET', run_key, 'status', 'wait:' .. wait, 'fate:' .. wait, call)
local answer = h[3] or ''
if not h[3] and h[1] == 'open' and h[2] and frame ~= '' and (call == '' or h[4]) then
  make_room(run_key)
  append_input(run_key, events, parser_lease, run, frame)
  close_wait(run_key, {unpack(KEYS, indexes_at)}, run, wait)
  redis.call('HSET', run_key, 'fate:' .. wait, fate)
  answer = fate
end
answer = answer == '' and '{}' or '{"fate":' .. answer .. '}'
if reply ~= run_key then redis.call('SET', reply, answer, 'PX', reply_ms) end
return answer
