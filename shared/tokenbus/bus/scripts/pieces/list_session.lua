-- List a session by the time of its last event, in the index of all and in that of its tenant. An index only serves to
-- find sessions: if it cannot be written, the session goes on. `lives_ms`: how long a session may live after an event.
-- Constants: MOST_FORGOTTEN
local function list_session(indexes, session, now, lives_ms)
  for _, index in ipairs(indexes) do
    if type(redis.pcall('ZADD', index, now, string.match(session, '[^:]+$'))) == 'number' then
      local gone = redis.pcall('ZRANGEBYSCORE', index, '-inf', now - lives_ms, 'LIMIT', 0, MOST_FORGOTTEN)
      if #gone > 0 then redis.pcall('ZREM', index, unpack(gone)) end
      redis.pcall('PEXPIRE', index, lives_ms)
    end
  end
end
