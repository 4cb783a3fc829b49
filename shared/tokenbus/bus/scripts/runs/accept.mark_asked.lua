-- Record that a policy asks for a run that is about to be published.
-- KEYS
--   run_key  hash rw
-- ARGV
--   ttl_ms  lifetime
-- Reply: 1, or 0 if the run is known already.
-- Atomic: a run that another client published is never marked.
-- Twice: refused: 0, as if another client had published it.
if redis.call('EXISTS', run_key) == 1 then return 0 end
redis.call('HSET', run_key, 'asked', 1)
redis.call('PEXPIRE', run_key, ttl_ms)
return 1
