-- A session: its hash, its log, the fates of its appends, and the messages that wait. `s` has the names of its keys and
-- what of its hash is known: `seq`, `run` (the open one or ''), `newest` (the newest event of that run); and the topic
-- of its partition, with how many entries that keeps: `topic`, `most`.
-- Uses: whole
-- Constants: MOST_EVENTS, MOST_EVENT_BYTES, TRIMMED_AT_ONCE, TRIMMED_BYTES, LARGE_BYTES
local function publish_session(s, kind, rest)
  -- A topic that cannot be written holds up no session.
  if not s.name then
    local h = redis.call('HMGET', s.session, 'name', 'tenant', 'made')
    s.name = ',"session":' .. cjson.encode(h[1] or '') .. ',"made":"' .. (h[3] or '') .. '"'
    if (h[2] or '') ~= '' then s.name = s.name .. ',"tenant":' .. cjson.encode(h[2]) end
  end
  local event = '{"type":"' .. kind .. '"' .. s.name .. rest .. '}'
  redis.pcall('XADD', s.topic, 'MAXLEN', '~', s.most, '*', '__data__', event)
end
local function session_event(s, kind, rest, last)
  -- `rest`: further members, as JSON that begins with a comma. Ids have no character that JSON would escape.
  -- `last`: the value of the last of them, if it may be long: each copy of it costs the server a millisecond.
  local place = ''
  if s.run ~= '' then place = ',"run":"' .. s.run .. '","run_seq":' .. whole(s.newest) end
  rest = ',"session_seq":' .. whole(s.seq) .. ',"at_ms":' .. whole(s.now) .. place .. rest
  local event = '{"type":"' .. kind .. '"' .. rest .. (last or '') .. '}'
  redis.call('XADD', s.log, '1-' .. whole(s.seq), '__data__', event)
  if #(last or '') > LARGE_BYTES then  -- what `trim_session` would read it for: its size, and whose fate it tells
    local fate_of = kind ~= 'appended' and string.match(rest, '"append":"([^"]+)"') or ''
    redis.call('HSET', s.appends, '#' .. whole(s.seq), whole(#event) .. ' ' .. fate_of)
    -- What the topic has of it.
    local kind_of = string.match(last, '^{"type":"[a-z]+"') or '{"type":""'
    last = kind_of .. ',"request":{},"messages":[]},"item_bytes":' .. whole(#last)
  end
  publish_session(s, kind, rest .. (last or ''))
  s.seq, s.told = s.seq + 1, (s.told or 0) + #event
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
  local events = redis.call('XLEN', s.log)
  local h = redis.call('HMGET', s.session, 'told', 'most_events')
  local bytes, most = tonumber(h[1] or '0') + (s.told or 0), tonumber(h[2] or MOST_EVENTS)
  local stay, least = math.max(1, events - TRIMMED_AT_ONCE), bytes - TRIMMED_BYTES
  while events > stay and bytes > least and (events > most or bytes > MOST_EVENT_BYTES) do
    local oldest = whole(s.seq - events)
    local size, fate_of = string.match(redis.call('HGET', s.appends, '#' .. oldest) or '', '^(%d+) (.*)$')
    local id = '1-' .. oldest
    if size then
      redis.call('HDEL', s.appends, '#' .. oldest)
    else
      local entry = redis.call('XRANGE', s.log, '-', '+', 'COUNT', 1)[1]
      local kind, append = string.match(entry[2][2], '^{"type":"([a-z_]+)".-"append":"([^"]+)"')
      id, size, fate_of = entry[1], #entry[2][2], kind ~= 'appended' and append or ''
    end
    if fate_of ~= '' then redis.call('HDEL', s.appends, fate_of) end
    redis.call('XDEL', s.log, id)
    events, bytes = events - 1, bytes - tonumber(size)
  end
  redis.call('HSET', s.session, 'told', whole(bytes))
  if s.told then redis.call('HSET', s.session, 'newest_ms', whole(s.now)) end
end
