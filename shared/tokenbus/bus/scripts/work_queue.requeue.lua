-- Move the consumer's own entries to the end, with new ids, as if never delivered.
-- KEYS
--   stream  stream rw
-- ARGV
--   group
--   consumer
--   ids...
-- Reply: how many of the entries were the consumer's.
-- Atomic: as for `finish`.
-- Twice: refused: 0, for the entries have other ids.
-- Uses: owns
local done = 0
for i = ids_at, #ARGV do
  local id = ARGV[i]
  if owns(stream, group, consumer, id) then
    local entry = redis.call('XRANGE', stream, id, id)[1]
    -- First, so that a full server has room for the new entry.
    redis.call('XACK', stream, group, id)
    redis.call('XDEL', stream, id)
    if entry then redis.call('XADD', stream, '*', unpack(entry[2])) end
    done = done + 1
  end
end
return done
