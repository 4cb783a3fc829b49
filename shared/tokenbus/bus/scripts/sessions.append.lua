-- Put something into a session.
-- KEYS
--   session  hash rw
--   log  stream w  of the session
--   appends  hash rw
--   queue  sorted set rw
--   history  hash rw
--   run_key  hash rw  of the open run, or else of the last one
--   run_log  stream r
--   next_key  hash rw  of the run that would start
--   next_log  stream w
--   events  stream w
--   turns  stream w
--   raw  stream w
--   control  stream w
--   parser_lease  hash rw
--   normalizer_lease  hash w
--   open_runs  sorted set w
--   ended_runs  sorted set w
--   sessions  sorted set rw  the index of all
--   topic  stream w  the events of all sessions
--   of_tenant...  sorted set rw + sorted set w + sorted set rw  of a tenant's session: the tenant's open runs, its
--     ended ones, and its sessions
-- ARGV
--   epoch
--   version  of the configuration that the caller saw, '' for no session
--   runs  how many runs the caller saw
--   open_run  the open run that the caller saw, or ''
--   lost  1 if nothing of that run is left
--   next_run
--   append
--   kind  message, add, configure, interrupt, withdraw, rewrite or delete
--   item  as JSON
--   work  of a message, packed; of others, messages as JSON
--   when_busy  of a message, or 'steer_now'
--   heard  last event that was heard, or ''
--   heard_characters  of it, or ''
--   frame  event that cancels or steers the open run
--   control_frame
--   subject  what to withdraw, how many runs to rewrite, or the run to interrupt, if it is not the newest
--   as_of  newest event that the caller of a rewrite saw, or ''
--   open_ms  lifetime of an open run
--   keep_ms  lifetime of a session
--   topic_entries  entries kept in the topic
--   renewed  when the lifetimes of the session's ended runs began, or '' for no change
--   fields...  of the session's hash, that the append sets
-- Reply: 'ok', 'known', 'moved' or 'stale'.
-- Atomic: an append is accepted once, and the run that it starts, the message that waits and its fate are one write.
-- Twice: refused: 'known'
-- Uses: now_ms, make_room, session_run, no_room, append_input, stop_run, list_session
-- Constants: LATER, MOST_WAITING, MOST_WAITING_BYTES, MOST_TAKEN_BYTES
if redis.call('HEXISTS', appends, append) == 1 then return 'known' end
local later = redis.call('HGET', parser_lease, 'epoch')
if later and tonumber(later) > tonumber(epoch) then return 'stale' end
local h = redis.call('HMGET', session, 'version', 'runs', 'run', 'seq', 'waiting', 'deleting')
if (h[1] or '') ~= version or (h[2] or '0') ~= runs or (h[3] or '') ~= open_run or h[6] then return 'moved' end
local s = {session = session, log = log, appends = appends, queue = queue, history = history, run_log = run_log,
           topic = topic, most = topic_entries, run = open_run, runs = tonumber(runs), seq = tonumber(h[4] or '0'),
           waiting = tonumber(h[5] or '0'), now = now_ms(), newest = -1}
local indexes = {sessions, KEYS[of_tenant_at + 2]}
local keys = {run_key = next_key, events = events, turns = turns, parser_lease = parser_lease, log = next_log,
              open_runs = open_runs, ended_runs = ended_runs,
              tenants_open = KEYS[of_tenant_at], tenants_ended = KEYS[of_tenant_at + 1]}
local full = (kind == 'message' or kind == 'add' or kind == 'rewrite' or version == '') and no_room()
if full then return full end
local r = redis.call('HMGET', run_key, 'status', 'attempt', 'closed', 'turn')
local newest = newest_of(run_log)
make_room(session)
local function told(name) session_event(s, name, ',"append":"' .. append .. '","item":', item) end
local function may_hear(through) return through == '' or tonumber(through) <= newest end
local function stop_open_run()
  if r[1] == 'open' then
    append_input(run_key, events, parser_lease, open_run, frame)
    stop_run(run_key, raw, normalizer_lease, control, open_run, control_frame, r, 'the run was cancelled', 'cancelling')
  end
end
local ended = {completed = true, incomplete = true, failed = true, cancelled = true}
if open_run ~= '' and (lost == '1' or ended[r[1]]) then
  -- Its end tells the session, too, in one write: an ended run that is open here was repaired after a fail-over.
  s.newest = lost == '1' and -1 or newest
  session_event(s, 'run_ended', ',"status":"' .. (lost == '1' and 'lost' or r[1]) .. '"')
  s.run = ''
elseif open_run ~= '' then
  s.newest = newest
end
if ARGV[fields_at] then redis.call('HSET', session, unpack(ARGV, fields_at)) end
if kind == 'configure' then
  if version == '' then
    redis.call('UNLINK', log)
    redis.call('UNLINK', queue, history)
    redis.call('HDEL', appends, '!')
  end
  told('configured')
  redis.call('HSET', appends, append, '{"state":"delivered"}')
  if work ~= '' then rewrite_history(s, 0, work) end
elseif kind == 'message' then
  told('appended')
  if s.run == '' then
    start_session_run(s, keys, next_run, {{append = append, work = cmsgpack.unpack(work)}}, open_ms)
  elseif when_busy == 'reject' then
    returned(s, append, 'busy', '')
  elseif not may_hear(heard) then
    returned(s, append, 'heard_too_far', '')
  elseif redis.call('ZCARD', queue) >= MOST_WAITING or s.waiting + #work > MOST_WAITING_BYTES then
    returned(s, append, 'queue_full', '')
  else
    redis.call('ZADD', queue, whole(s.seq + (when_busy == 'interrupt' and 0 or LATER)), append)
    redis.call('HSET', appends, append, '{"state":"appended"}', '!' .. append, work)
    if string.sub(when_busy, 1, 5) == 'steer' then redis.call('HSET', appends, '^' .. append, 1) end
    if when_busy == 'steer_now' and r[1] == 'open' and redis.call('HGET', session, 'hurry') ~= open_run then
      redis.call('HSET', session, 'hurry', open_run)
      append_input(run_key, events, parser_lease, open_run, frame)
    end
    s.waiting = s.waiting + #work
    if when_busy == 'interrupt' then stop_open_run() end
  end
elseif kind == 'add' then
  told('appended')
  local field = 'add:' .. whole(s.runs)
  local there = redis.call('HGET', history, field)
  if s.run ~= '' and when_busy == 'reject' then
    returned(s, append, 'busy', '')
  elseif there and #there + #work > MOST_TAKEN_BYTES then
    returned(s, append, 'queue_full', '')
  else
    redis.call('HSET', history, field, (there and string.sub(there, 1, -2) .. ',' or '[') .. work .. ']')
    delivered(s, append, 0)
  end
elseif kind == 'rewrite' then
  told('appended')
  if (s.run ~= '' and tonumber(subject) >= s.runs) or (as_of ~= '' and tonumber(as_of) < s.seq - 2) then
    returned(s, append, 'busy', '')
  elseif rewrite_history(s, tonumber(subject), work) then
    if tonumber(subject) == s.runs then redis.call('HDEL', history, 'add:' .. whole(s.runs)) end
    delivered(s, append, 0)
  else
    returned(s, append, 'refused', '"the history was rewritten behind that run"')
  end
elseif kind == 'interrupt' then
  told('appended')
  if subject ~= '' then
    returned(s, append, 'newer_run', '')
  elseif s.run ~= '' and may_hear(heard) then
    stop_open_run()
    delivered(s, append, r[4] or '0')
  elseif s.run == '' and heard ~= '' and runs ~= '0' and may_hear(heard) then
    -- The last run ended before its speech did.
    redis.call('HSET', history, 'heard:' .. whole(s.runs - 1), heard .. ' ' .. heard_characters)
    delivered(s, append, 0)
  else
    returned(s, append, may_hear(heard) and 'nothing_open' or 'heard_too_far', '')
  end
elseif kind == 'delete' then
  for _, index in ipairs(indexes) do redis.pcall('ZREM', index, string.match(session, '[^:]+$')) end
  if s.run == '' then
    delete_session(s, append)
    return 'ok'
  end
  told('appended')
  redis.call('UNLINK', appends, queue, history)
  redis.call('HSET', session, 'deleting', append)
  redis.call('HSET', appends, append, '{"state":"appended"}', '!', append)
  s.waiting, indexes = 0, {}
  stop_open_run()
else
  told('appended')
  local size = redis.call('HSTRLEN', appends, '!' .. subject)
  if size > 0 then
    redis.call('HDEL', appends, '!' .. subject, '^' .. subject)
    redis.call('ZREM', queue, subject)
    s.waiting = s.waiting - size
    returned(s, subject, 'withdrawn', '')
    delivered(s, append, 0)
  else
    returned(s, append, 'not_waiting', '')
  end
end
list_session(indexes, session, s.now, open_ms + keep_ms)
if renewed ~= '' then redis.call('HSET', session, 'renewed', renewed) end
keep_session(s, s.run ~= '' and open_ms + keep_ms or keep_ms)
return 'ok'
