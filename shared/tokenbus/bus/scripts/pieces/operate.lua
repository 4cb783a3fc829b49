-- The writes of a commit, and what of them must not fail it.
-- Uses: index_ended, append_frame, append_input, session_run, waits, stop_run
-- Constants: PUBLISH, APPEND, PUBLISH_TO_TOPIC, COUNT, SET, DELETE, EXPIRE, CLOSE_ATTEMPT, END_RUN, VOID,
--   END_SESSION_RUN, STEER_SESSION_RUN, WAIT, UNWAIT, CANCEL_CHILD, JOIN_TREE
local function of_session(step, s, run, ...)
  -- A step of a session fails no commit, which is of other runs too: keys of a wrong type hold up this session only.
  -- Redis does not undo what the step wrote, and the worker's reply does not tell, so the server's log does.
  local done, err = pcall(step, s, ...)
  if done then return end
  local why = type(err) == 'table' and err.err or tostring(err)
  local line = 'tokenbus: session_step_failed session=' .. s.session .. ' run=' .. run .. ': ' .. why
  line = string.gsub(string.sub(line, 1, 500), '%c', ' ')
  redis.log(redis.LOG_WARNING, line)
end
-- Do the operations ARGV[i] to ARGV[final] of a commit, whose keys are numbered from base + 1. `alien`: those of a
-- wrong type; `lags`: gets the lag of each lease that is counted with ARRIVED, or nil; `added`: gets the last id that
-- was appended to each stream.
local function operate(i, final, base, alien, most, now, lags, added)
  while i <= final do
    local op = ARGV[i]
    local ours = not alien[tonumber(ARGV[i + 1])]
    local key = KEYS[base + ARGV[i + 1]]
    if op == PUBLISH then
      -- The log refuses an id that it has passed. Then the topics have the event too: both were written together.
      local done = ours and redis.pcall('XADD', key, ARGV[i + 2], '__data__', ARGV[i + 3])
      local last = i + 4 + ARGV[i + 4]
      if type(done) ~= 'table' then
        for j = i + 5, last do
          redis.call('XADD', KEYS[base + ARGV[j]], 'MAXLEN', '~', most, '*', '__data__', ARGV[i + 3])
        end
      end
      i = last + 1
    elseif op == APPEND then
      local last = i + 2 + ARGV[i + 2]
      if ours then added[key] = redis.call('XADD', key, '*', unpack(ARGV, i + 3, last)) end
      i = last + 1
    elseif op == PUBLISH_TO_TOPIC then
      redis.call('XADD', key, 'MAXLEN', '~', most, '*', '__data__', ARGV[i + 2])
      i = i + 3
    elseif op == COUNT then
      redis.call('HINCRBY', key, 'arrived', ARGV[i + 2])
      i = i + 3
    elseif op == SET then
      local last = i + 2 + ARGV[i + 2]
      if ours then redis.call('HSET', key, unpack(ARGV, i + 3, last)) end
      i = last + 1
    elseif op == DELETE then
      if ours then redis.call('HDEL', key, ARGV[i + 2]) end
      i = i + 3
    elseif op == EXPIRE then
      if ours then redis.call('PEXPIRE', key, ARGV[i + 2]) end
      i = i + 3
    elseif op == CLOSE_ATTEMPT then
      local attempt, raw, lease, control, run, lost, control_frame = unpack(ARGV, i + 2, i + 8)
      if ours and redis.call('HGET', key, 'closed') ~= attempt then
        append_frame(KEYS[base + raw], KEYS[base + lease], run, lost)
        redis.call('XADD', KEYS[base + control], 'MAXLEN', '~', 1000, '*', run, control_frame)
        redis.call('HSET', key, 'closed', attempt)
      end
      i = i + 9
    elseif op == END_RUN then
      local open, ended, waiting, tenants_open, tenants_ended, tenants_waiting, run, keep = unpack(ARGV, i + 2, i + 9)
      if ours then
        redis.call('HSET', key, 'ended', now)
        -- What the hash says is waited for, whatever the parser knows of it.
        local names = redis.call('HGET', key, 'waits') or ''
        for wait in string.gmatch(names, '%S+') do
          close_wait(key, {KEYS[base + waiting], KEYS[base + tenants_waiting]}, run, wait)
        end
      end
      index_ended(KEYS[base + open], KEYS[base + ended], run, tonumber(keep), now)
      if tenants_open ~= open then
        index_ended(KEYS[base + tenants_open], KEYS[base + tenants_ended], run, tonumber(keep), now)
      end
      i = i + 10
    elseif op == VOID then
      local till = redis.call('XREVRANGE', KEYS[base + ARGV[i + 2]], '+', '-', 'COUNT', 1)[1]
      till = till and till[1] or '0-0'
      -- What `Partition` saves of a run whose entries are ignored up to there: msgpack of a `SavedState`.
      local head = #till < 32 and string.char(160 + #till) or string.char(217, #till)
      if ours then redis.call('HSET', key, ARGV[i + 3], string.char(148) .. head .. till .. ARGV[i + 4]) end
      i = i + 5
    elseif op == END_SESSION_RUN then
      local at = {}
      for k = 1, 18 do at[k] = KEYS[base + ARGV[i + 1 + k]] end
      local run, status, next_run, open_ms, keep_ms = unpack(ARGV, i + 20, i + 24)
      local s = {session = key, log = at[1], appends = at[2], queue = at[3], history = at[4], run_log = at[5],
                 run_key = at[15], topic = at[18], most = most, now = now}
      local next_keys = {run_key = at[6], log = at[7], events = at[8], turns = at[9], parser_lease = at[10],
                         open_runs = at[11], ended_runs = at[12], tenants_open = at[13], tenants_ended = at[14],
                         sessions = {at[16], at[17]}}
      of_session(end_session_run, s, run, next_keys, run, status, next_run, tonumber(open_ms), tonumber(keep_ms))
      i = i + 25
    elseif op == STEER_SESSION_RUN then
      local at = {}
      for k = 1, 6 do at[k] = KEYS[base + ARGV[i + 1 + k]] end
      local s = {session = key, log = at[1], appends = at[2], queue = at[3], history = at[4], run_log = at[5],
                 topic = at[6], most = most, now = now}
      local run, turn, keep_ms = unpack(ARGV, i + 8, i + 10)
      of_session(steer_session_run, s, run, run, turn, keep_ms)
      i = i + 11
    elseif op == WAIT then
      local index, tenants, run, wait, record, since, keep = unpack(ARGV, i + 2, i + 8)
      if ours then open_wait(key, {KEYS[base + index], KEYS[base + tenants]}, run, wait, record, since, keep) end
      i = i + 9
    elseif op == UNWAIT then
      local index, tenants, run, wait = unpack(ARGV, i + 2, i + 5)
      if ours then close_wait(key, {KEYS[base + index], KEYS[base + tenants]}, run, wait) end
      i = i + 6
    elseif op == CANCEL_CHILD then
      local at = {}
      for k = 1, 5 do at[k] = KEYS[base + ARGV[i + 1 + k]] end
      local run, event, control_frame = unpack(ARGV, i + 7, i + 9)
      local h = ours and redis.call('HMGET', key, 'status', 'attempt', 'closed', 'turn')
      if h and h[1] == 'open' then
        -- An EventFrame of no attempt: turn, attempt, time, its one event.
        local frame = string.char(148, 0, 0) .. cmsgpack.pack(now) .. string.char(145) .. event
        append_input(key, at[1], at[4], run, frame)
        stop_run(key, at[2], at[5], at[3], run, control_frame, h, 'the parent run ended', 'cancelling')
      end
      i = i + 10
    elseif op == JOIN_TREE then
      if ours then redis.call('XADD', key, 'NOMKSTREAM', '*', ARGV[i + 2], ARGV[i + 3]) end
      i = i + 4
    else -- ARRIVED
      local arrived = redis.call('HINCRBY', key, 'arrived', ARGV[i + 2])
      if lags then lags[#lags + 1] = arrived - tonumber(redis.call('HGET', key, 'done') or '0') end
      i = i + 3
    end
  end
end
