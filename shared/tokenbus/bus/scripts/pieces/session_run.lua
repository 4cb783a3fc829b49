-- The runs of a session: how they begin and end. `s`: as in `session`, with `runs` (how many there were) and `waiting`
-- (the bytes that wait) too.
-- Uses: session, whole, begin_run, list_session
-- Constants: DELETED_MS, FORGOTTEN_AT_ONCE, MOST_RUNS, MOST_TAKEN_BYTES
local PIECES = {'add:', 'in:', 'steer:', 'out:', 'heard:'}
local function forget_before(s, first)
  -- What the runs before this one added to the history; the rest as later runs begin.
  local from = tonumber(redis.call('HGET', s.history, 'kept_from') or '0')
  local to = math.min(first, from + FORGOTTEN_AT_ONCE)
  if to <= from then return end
  local fields = {}
  for n = from, to - 1 do
    for _, name in ipairs(PIECES) do fields[#fields + 1] = name .. whole(n) end
  end
  redis.call('HDEL', s.history, unpack(fields))
  redis.call('HSET', s.history, 'kept_from', whole(to))
end
local function forget_runs(s)
  -- What its oldest runs added to the history, and all before them, so that it has what the newest added.
  local most = tonumber(redis.call('HGET', s.session, 'most_runs') or MOST_RUNS)
  local began = tonumber(redis.call('HGET', s.history, 'begins_at') or '0')
  local first = math.max(began, s.runs - most + 1)
  if first > began then
    redis.call('HDEL', s.history, 'before')
    redis.call('HSET', s.history, 'begins_at', whole(first))
  end
  forget_before(s, first)
end
local function start_session_run(s, keys, run, taken, ttl_ms)
  -- `taken`: appends and their work; `keys`: as of `begin_run`.
  local last = taken[#taken].work
  local fields, messages = last[7], {'['}
  if last[3] > 0 then fields[#fields + 1], fields[#fields + 2] = 'deadline', whole(s.now + last[3]) end
  for _, each in ipairs(taken) do
    messages[#messages + 1] = each.work[1]
    messages[#messages + 1] = ','
  end
  messages[#messages] = ']'
  -- An EventFrame of the run itself: turn, attempt, time, its one event; and the TurnWork of its first attempt.
  local frame = string.char(148, 0, 0) .. cmsgpack.pack(s.now) .. string.char(145) .. last[2]
  local work = cmsgpack.pack({run, 0, 1, 0, last[5], last[4] == 1, 0})
  local h = redis.call('HMGET', keys.run_key, 'status', 'cancel')
  begin_run(keys, run, frame, work, h[1] == 'awaited' and h[2], fields, whole(s.now), ttl_ms)
  redis.call('HSET', s.history, 'in:' .. whole(s.runs), table.concat(messages))
  forget_runs(s)
  s.run, s.runs, s.newest = run, s.runs + 1, -1
  for _, each in ipairs(taken) do delivered(s, each.append, 0) end
end
local function take_waiting(s, together)
  -- The first message that waits; together: with those that follow under the same configuration, as far as one step
  -- of the server may write them.
  local taken, more, bytes = {}, true, 0
  while more do
    local append = redis.call('ZRANGE', s.queue, 0, 0)[1]
    if not append then return taken end
    local packed = redis.call('HGET', s.appends, '!' .. append)
    local work = packed and cmsgpack.unpack(packed)
    bytes = bytes + #(packed or '')
    more = not work or #taken == 0
           or (together and bytes <= MOST_TAKEN_BYTES and work[6] == taken[1].work[6])
    if more then
      redis.call('ZREM', s.queue, append)
      redis.call('HDEL', s.appends, '!' .. append, '^' .. append)
      if work then
        taken[#taken + 1] = {append = append, work = work}
        s.waiting = s.waiting - #packed
        more = together
      end
    end
  end
  return taken
end
local function rewrite_history(s, runs, messages)
  -- What comes before run number `runs` is these messages; false if the history was rewritten behind that.
  local began = tonumber(redis.call('HGET', s.history, 'begins_at') or '0')
  if runs < began then return false end
  forget_before(s, runs)
  local edits = tonumber(redis.call('HGET', s.history, 'edits') or '0')
  redis.call('HSET', s.history, 'before', messages, 'begins_at', whole(runs), 'edits', whole(edits + 1))
  return true
end
local function keep_session(s, ttl_ms)
  trim_session(s)
  redis.call('HSET', s.session, 'seq', whole(s.seq), 'run', s.run, 'runs', whole(s.runs), 'waiting', whole(s.waiting))
  for _, key in ipairs({s.session, s.log, s.appends, s.queue, s.history}) do redis.call('PEXPIRE', key, ttl_ms) end
end
local function delete_session(s, append)
  -- Nothing stays but the fate of the append that asked for it, and a mark for those who wait for other fates.
  publish_session(s, 'deleted', ',"session_seq":' .. whole(s.seq) .. ',"at_ms":' .. whole(s.now)
                                .. ',"append":"' .. append .. '"')
  redis.call('UNLINK', s.session, s.appends, s.queue, s.history)
  redis.call('UNLINK', s.log)
  redis.call('HSET', s.appends, append, '{"state":"delivered"}', '!', append .. '!')
  redis.call('PEXPIRE', s.appends, DELETED_MS)
end
local function open_session_run(s, run)
  -- Whether it is the session's open run; if so, read what the functions above need.
  local h = redis.call('HMGET', s.session, 'run', 'runs', 'seq', 'waiting', 'together', 'deleting')
  if h[1] ~= run then return false end
  s.run, s.runs, s.seq, s.waiting = run, tonumber(h[2]), tonumber(h[3]), tonumber(h[4])
  s.together, s.deleting, s.newest = h[5] == '1', h[6], newest_of(s.run_log)
  return true
end
local function steer_session_run(s, run, turn, ttl_ms)
  -- Messages that steer go into the turn that begins: they are added to what the run has in the history.
  if not open_session_run(s, run) then return end
  redis.call('HDEL', s.session, 'hurry')
  local field = 'steer:' .. whole(s.runs - 1)
  local before = redis.call('HGET', s.history, field)
  local all, bytes = {before and string.sub(before, 2, -2) or nil}, #(before or '')
  local there = #all
  for _, append in ipairs(redis.call('ZRANGE', s.queue, 0, -1)) do
    local packed = redis.call('HMGET', s.appends, '!' .. append, '^' .. append)
    if packed[1] and packed[2] then
      bytes = bytes + #packed[1]
      if #all > 0 and bytes > MOST_TAKEN_BYTES then break end  -- the rest waits for the next turn or run
      redis.call('ZREM', s.queue, append)
      redis.call('HDEL', s.appends, '!' .. append, '^' .. append)
      s.waiting = s.waiting - #packed[1]
      all[#all + 1] = '[' .. turn .. ',[' .. cmsgpack.unpack(packed[1])[1] .. ']]'
      delivered(s, append, turn)
    end
  end
  if #all == there then return end
  redis.call('HSET', s.history, field, '[' .. table.concat(all, ',') .. ']')
  keep_session(s, ttl_ms)
end
local function end_session_run(s, keys, run, status, next_run, open_ms, keep_ms)
  -- Start the next one with what waits; no effect if `run` is not the session's open run.
  if not open_session_run(s, run) then return end
  if s.deleting then
    delete_session(s, s.deleting)
    redis.call('UNLINK', s.run_key, s.run_log)
    for _, index in ipairs({keys.ended_runs, keys.tenants_ended}) do redis.pcall('ZREM', index, run) end
    return
  end
  session_event(s, 'run_ended', ',"status":"' .. status .. '"')
  s.run = ''
  local taken = take_waiting(s, s.together)
  if #taken > 0 then start_session_run(s, keys, next_run, taken, open_ms) end
  list_session(keys.sessions, s.session, s.now, open_ms + keep_ms)
  keep_session(s, #taken > 0 and open_ms + keep_ms or keep_ms)
end
