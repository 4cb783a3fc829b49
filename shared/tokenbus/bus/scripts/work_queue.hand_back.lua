-- Return the consumer's own entries for the next claim, as if never delivered.
-- KEYS
--   stream  stream rw
-- ARGV
--   group
--   consumer
--   ids...
-- Reply: how many of the entries were the consumer's.
-- Atomic: as for `finish`.
-- Twice: refused: 0, for `NOBODY` owns them.
-- Uses: owns
-- Constants: NOBODY, HANDED_BACK_MS
local done = 0
for i = ids_at, #ARGV do
  if owns(stream, group, consumer, ARGV[i]) then
    redis.call('XCLAIM', stream, group, NOBODY, 0, ARGV[i], 'IDLE', HANDED_BACK_MS, 'RETRYCOUNT', 0, 'JUSTID')
    done = done + 1
  end
end
return done
