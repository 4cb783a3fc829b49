-- Keep what an ended run of a session adds to its history.
-- KEYS
--   session  hash r
--   history  hash w
-- ARGV
--   made  which session of this name
--   name  field
--   messages  as JSON
-- Reply: 1, or 0 if the session is gone.
-- Atomic: a session that was deleted leaves no key.
-- Twice: same
local h = redis.call('HMGET', session, 'made', 'deleting')
if h[1] ~= made or h[2] then return 0 end
redis.call('HSET', history, name, messages)
redis.call('PEXPIRE', history, redis.call('PTTL', session))
return 1
