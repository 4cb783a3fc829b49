-- Put runs away that only wait: the state of each goes into its hash, and the parser forgets it.
-- KEYS
--   lease  hash rw  of the parser
--   events  stream rw
--   index  sorted set rw  of runs that are put away, by the time at which they must be back
--   run_keys...  hash rw  of each run its own, and those of the child runs that it waits for
-- ARGV
--   token
--   offset  up to which the states have the events
--   forget  frame by which the parser forgets a run
--   ttl_ms  how long the index is kept at least
--   parts...  of each run: its id, the frame with its state, when it must be back, its number of such children
-- Reply: how many were put away.
-- Atomic: a state that is stored has all events of its run, and whatever comes later finds it there.
-- Twice: refused: 0
-- Uses: no_room
-- Constants: RUNS_SHARE, MOST_UNREAD
local h = redis.call('HMGET', lease, 'token', 'offset')
if h[1] ~= token or h[2] ~= offset or no_room() then return 0 end
local unread = redis.call('XRANGE', events, '(' .. offset, '+', 'COUNT', MOST_UNREAD)
if #unread == MOST_UNREAD then return 0 end
local busy, away, size = {}, {}, 0
for _, entry in ipairs(unread) do
  for i = 1, #entry[2], 2 do busy[entry[2][i]] = true end
end
local k = run_keys_at
for at = parts_at, #ARGV, 4 do
  local run, state, due, children = unpack(ARGV, at, at + 3)
  local r = redis.pcall('HMGET', KEYS[k], 'status', 'attempt', 'closed')
  local rests = r[1] == 'open' and r[2] == r[3] and not busy[run]
  -- The parser looks for the call of a child that is not open: its entry may be lost.
  for child = k + 1, k + children do
    rests = rests and redis.pcall('HGET', KEYS[child], 'status') == 'open'
  end
  if rests and type(redis.pcall('ZADD', index, due, run)) == 'number' then
    redis.call('HSET', KEYS[k], 'away', state)
    away[#away + 1], away[#away + 2] = run, forget
    size = size + #forget
  end
  k = k + 1 + children
end
if #away == 0 then return 0 end
redis.call('XADD', events, '*', unpack(away))
redis.call('HINCRBY', lease, 'arrived', size)
local left, listed = redis.pcall('PTTL', index), redis.pcall('ZCARD', index)
if type(left) == 'number' and left < tonumber(ttl_ms) then redis.pcall('PEXPIRE', index, ttl_ms) end
if type(listed) == 'number' then redis.call('HSET', lease, 'away', listed) end
return #away / 2
