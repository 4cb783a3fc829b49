-- Keep the consumer's own entries alive: claiming them again resets their idle time.
-- KEYS
--   stream  stream rw
-- ARGV
--   group
--   consumer
--   ids...
-- Reply: the ids that another consumer owns now.
-- Atomic: between the check of the owner and the claim, no other worker can claim the entry.
-- Twice: same: the idle time counts from the later one.
-- Uses: owns
local lost = {}
for i = ids_at, #ARGV do
  if owns(stream, group, consumer, ARGV[i]) then redis.call('XCLAIM', stream, group, consumer, 0, ARGV[i], 'JUSTID')
  else lost[#lost + 1] = ARGV[i] end
end
return lost
