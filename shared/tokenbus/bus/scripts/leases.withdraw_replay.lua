-- Take back what an unfinished replay counted and noted.
-- KEYS
--   lease  hash rw
-- ARGV
--   token
--   count  field of the count
--   notes...  if the replay made notes: their field, the notes before it
-- Reply: 1, or 0 if another token holds the lease, or if nothing is counted.
-- Atomic: a worker that lost the lease cannot change what its successor counts and notes.
-- Twice: again: an earlier worker's count goes too, and the next owner is less careful by one try; it is sent once.
-- Uses: make_room
local h = redis.call('HMGET', lease, 'token', count)
local counted = tonumber(h[2] or '0')
if h[1] ~= token or counted == 0 then return 0 end
make_room(lease)
redis.call('HSET', lease, count, counted - 1)
if ARGV[notes_at] then redis.call('HSET', lease, unpack(ARGV, notes_at)) end
return 1
