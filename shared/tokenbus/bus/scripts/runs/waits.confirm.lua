-- Keep what became of a decision for as long again.
-- KEYS
--   reply  any w
-- ARGV
--   reply_ms  how long the reply is kept
-- Reply: 1; 0 if there is none.
-- Atomic: one command.
-- Twice: same
return redis.call('PEXPIRE', reply, reply_ms)
