-- Delete all keys of a run that is not open, and its places in the index.
-- KEYS
--   run_key  hash rw
--   log  stream w
--   tape  stream w
--   tree  stream w  the order of its tree
--   indexes...  sorted set w
-- ARGV
--   run
-- Reply: 1; 0 if the run is open, which stays.
-- Atomic: a run that is accepted again under its id meanwhile keeps its keys.
-- Twice: same
local unended = {open = true, cancelling = true, expiring = true}
local status = redis.pcall('HGET', run_key, 'status')
if type(status) == 'string' and unended[status] then return 0 end
for i = indexes_at, #KEYS do redis.pcall('ZREM', KEYS[i], run) end
redis.call('UNLINK', run_key, log, tape, tree)
return 1
