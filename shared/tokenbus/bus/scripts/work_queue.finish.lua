-- Acknowledge and delete the consumer's own entries.
-- KEYS
--   stream  stream rw
-- ARGV
--   group
--   consumer
--   ids...
-- Reply: how many of the entries were the consumer's.
-- Atomic: between the check of the owner and the write, no other worker can claim the entry.
-- Twice: refused: 0, as if another worker owned them.
-- Uses: owns
local done = 0
for i = ids_at, #ARGV do
  if owns(stream, group, consumer, ARGV[i]) then
    redis.call('XACK', stream, group, ARGV[i])
    redis.call('XDEL', stream, ARGV[i])
    done = done + 1
  end
end
return done
