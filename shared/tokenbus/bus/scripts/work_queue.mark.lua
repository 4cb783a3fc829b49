-- Record in its number of deliveries whether work on one of the consumer's entries has begun.
-- KEYS
--   stream  stream rw
-- ARGV
--   group
--   consumer
--   entry  its id
--   deliveries  to record
-- Reply: 1, or 0 if another consumer owns the entry.
-- Atomic: as for `heartbeat`.
-- Twice: same
-- Uses: owns
if not owns(stream, group, consumer, entry) then return 0 end
redis.call('XCLAIM', stream, group, consumer, 0, entry, 'RETRYCOUNT', deliveries, 'JUSTID')
return 1
