-- Append an event of a tool call that is open; false if it is not.
-- Uses: make_room, append_input
local function append_of_call(run_key, events, parser_lease, run, call, fence, frame)
  local h = redis.call('HMGET', run_key, 'status', call)
  if h[1] ~= 'open' or h[2] ~= fence then return false end
  make_room(run_key)
  append_input(run_key, events, parser_lease, run, frame)
  return true
end
