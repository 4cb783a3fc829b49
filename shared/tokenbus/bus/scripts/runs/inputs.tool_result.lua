-- Append a tool's result, and close its call.
-- KEYS
--   run_key  hash rw
--   events  stream w
--   parser_lease  hash w
-- ARGV
--   run
--   call  field of the call
--   fence  value of that field
--   frame  event
-- Reply: 1, or 0 if the call is not open.
-- Atomic: of two results, one is appended.
-- Twice: refused: 0
-- Uses: append_of_call
if not append_of_call(run_key, events, parser_lease, run, call, fence, frame) then return 0 end
redis.call('HDEL', run_key, call)
return 1
