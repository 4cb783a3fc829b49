-- A session: its hash, its log, the fates of its appends, and the messages that wait. `s` has the names of its keys and
-- what of its hash is known: `seq`, `run` (the open one or ''), `newest` (the newest event of that run).
-- Uses: whole
-- Constants: MOST_EVENTS, TRIMMED_AT_ONCE
local function session_event(s, kind, rest)
  -- `rest`: further members, as JSON that begins with a comma. Ids have no character that JSON would escape.
  local place = ''
  if s.run ~= '' then place = ',"run":"' .. s.run .. '","run_seq":' .. whole(s.newest) end
  redis.call('XADD', s.log, '1-' .. whole(s.seq), '__data__', '{"type":"' .. kind .. '","session_seq":' .. whole(s.seq)
             .. ',"at_ms":' .. whole(s.now) .. place .. rest .. '}')
  s.seq = s.seq + 1
end
local function newest_of(log)
  local last = redis.call('XREVRANGE', log, '+', '-', 'COUNT', 1)[1]
  return last and tonumber(string.match(last[1], '%-(%d+)$')) or -1
end
local function returned(s, append, reason, problem)
  -- `problem`: JSON text or ''.
  local why = ',"reason":"' .. reason .. '"'
  if problem ~= '' then why = why .. ',"problem":' .. problem end
  session_event(s, 'returned', ',"append":"' .. append .. '"' .. why)
  redis.call('HSET', s.appends, append, '{"state":"returned"' .. why .. '}')
end
local function delivered(s, append, turn)
  session_event(s, 'delivered', ',"append":"' .. append .. '","turn":' .. turn)
  local where = ''
  if s.run ~= '' then where = ',"run":"' .. s.run .. '","turn":' .. turn end
  redis.call('HSET', s.appends, append, '{"state":"delivered"' .. where .. '}')
end
local function trim_session(s)
  -- An old event goes with the fate that it tells; the fate of an append which waits goes with the event of its end.
  local more = redis.call('XLEN', s.log) - MOST_EVENTS
  if more <= 0 then return end
  if more > TRIMMED_AT_ONCE then more = TRIMMED_AT_ONCE end
  for _, entry in ipairs(redis.call('XRANGE', s.log, '-', '+', 'COUNT', more)) do
    local kind, append = string.match(entry[2][2], '^{"type":"([a-z_]+)".-"append":"([^"]+)"')
    if append and kind ~= 'appended' then redis.call('HDEL', s.appends, append) end
    redis.call('XDEL', s.log, entry[1])
  end
end
