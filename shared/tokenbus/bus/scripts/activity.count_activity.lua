-- Add to the counts of a time slot, and set its levels.
-- KEYS
--   slot  hash rw
-- ARGV
--   kept_ms  lifetime
--   counts  how many counts follow
--   fields...  field and value of each count, then of each level
-- Reply: 1.
-- Atomic: a reader never sees a part of one worker's counts, and the key never lacks its lifetime.
-- Twice: again: a plot counts the same twice; nothing decides by it.
local last = fields_at + 2 * counts - 1
for i = fields_at, last, 2 do redis.call('HINCRBY', slot, ARGV[i], ARGV[i + 1]) end
for i = last + 1, #ARGV, 2 do redis.call('HSET', slot, ARGV[i], ARGV[i + 1]) end
redis.call('PEXPIRE', slot, kept_ms)
return 1
