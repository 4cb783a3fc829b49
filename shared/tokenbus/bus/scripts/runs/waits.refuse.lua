-- Tell the sender of a decision why it was refused.
-- KEYS
--   reply  any w
-- ARGV
--   answer
--   reply_ms  how long the reply is kept
-- Reply: what was written.
-- Atomic: the reply does not stay.
-- Twice: same
redis.call('SET', reply, answer, 'PX', reply_ms)
return answer
