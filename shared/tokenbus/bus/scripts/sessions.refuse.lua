-- Return an append that is invalid, or that its policies rejected.
-- KEYS
--   session  hash rw
--   log  stream w  of the session
--   appends  hash rw
--   run_log  stream r  of the open run, or any
--   topic  stream w  the events of all sessions
-- ARGV
--   open_run  that the caller saw, or ''
--   append
--   reason
--   problem  as JSON
--   ttl_ms  lifetime of the fate if there is no session
--   topic_entries  entries kept in the topic
-- Reply: 'ok', 'known' or 'moved'.
-- Atomic: the event and the fate are one write.
-- Twice: refused: 'known'
-- Uses: now_ms, make_room, session
if redis.call('HEXISTS', appends, append) == 1 then return 'known' end
local h = redis.call('HMGET', session, 'run', 'seq')
if (h[1] or '') ~= open_run then return 'moved' end
make_room(session)
if h[2] then
  local s = {session = session, log = log, appends = appends, topic = topic, most = topic_entries, run = open_run,
             newest = newest_of(run_log), seq = tonumber(h[2]), now = now_ms()}
  returned(s, append, reason, problem)
  redis.call('HSET', session, 'seq', whole(s.seq))
  trim_session(s)
else
  redis.call('HSET', appends, append, '{"state":"returned","reason":"' .. reason .. '","problem":' .. problem .. '}')
  redis.call('PEXPIRE', appends, ttl_ms)
end
return 'ok'
