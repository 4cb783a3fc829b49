-- Delete ended runs before their time. One that is to be recorded stays, and stays on the list; so does one that is to
-- be archived, if it ended at `held_after` or later, and one of a session, whose history it is.
-- KEYS
--   ended_runs  sorted set rw
--   keys...  hash rw + stream w + stream w  of each run: its hash, its log and the order of its tree
-- ARGV
--   held_after
--   runs...
-- Reply: how many do not stay.
-- Atomic: a run that is accepted again under its id meanwhile keeps its keys.
-- Twice: same
-- Constants: RECORD, ARCHIVE, ENDED_AT
local ended = {completed = true, incomplete = true, failed = true, cancelled = true}
local gone = 0
for i = runs_at, #ARGV do
  local k = keys_at + 3 * (i - runs_at)
  local status = redis.pcall('HGET', KEYS[k], 'status')
  local is_ended = type(status) == 'string' and ended[status]
  local of_session = string.find(ARGV[i], '^s%.%x+%.%x+%.%d+$')
  local held = is_ended and (of_session or redis.call('HEXISTS', KEYS[k], RECORD) == 1)
  if is_ended and not held and redis.call('HEXISTS', KEYS[k], ARCHIVE) == 1 then
    held = tonumber(redis.call('HGET', KEYS[k], ENDED_AT) or 0) >= tonumber(held_after)
  end
  if not held then
    if is_ended then redis.call('UNLINK', KEYS[k], KEYS[k + 1], KEYS[k + 2]) end
    redis.pcall('ZREM', ended_runs, ARGV[i])
    gone = gone + 1
  end
end
return gone
