-- Put a run back, if it is put away, and remove it from the index.
-- KEYS
--   run_key  hash rw
--   events  stream w
--   parser_lease  hash w
--   index  sorted set rw  of runs that are put away
-- ARGV
--   run
-- Reply: 1, or 0 if it is not put away.
-- Atomic: the state is in the hash or in the events, and never in both.
-- Twice: refused: 0
-- Uses: make_room, append_frame
local h = redis.pcall('HMGET', run_key, 'status', 'away')
local away = h[1] == 'open' and h[2]
make_room(parser_lease)
redis.pcall('ZREM', index, run)
local listed = redis.pcall('ZCARD', index)
if type(listed) == 'number' then redis.call('HSET', parser_lease, 'away', listed) end
if away then append_frame(events, parser_lease, run, away) end
if h[2] then redis.call('HDEL', run_key, 'away') end
return away and 1 or 0
