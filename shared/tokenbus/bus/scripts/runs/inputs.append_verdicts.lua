-- Append policy verdicts of a run.
-- KEYS
--   run_key  hash rw
--   events  stream w
--   parser_lease  hash w
--   policy_lease  hash r
-- ARGV
--   run
--   token
--   frame  event
-- Reply: 'ok', 'fenced', 'gone', or the status of a run that is not open.
-- Atomic: a worker that lost the partition appends nothing.
-- Twice: again: the parser applies each part of a verdict once.
-- Uses: refusal_of_judge, make_room, append_input
local refused = refusal_of_judge(run_key, policy_lease, token)
if refused then return refused end
make_room(run_key)
append_input(run_key, events, parser_lease, run, frame)
return 'ok'
