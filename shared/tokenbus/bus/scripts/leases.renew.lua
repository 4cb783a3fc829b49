-- Extend a lease, and repair its lag counters if all input is consumed.
-- KEYS
--   lease  hash rw
--   stream  stream r  the stage's input
-- ARGV
--   token
--   ttl_ms
-- Reply: the committed offset; '' if another token holds the lease.
-- Atomic: a worker that lost the lease cannot extend its successor's.
-- Twice: same: the lease counts from the later one.
-- Uses: now_ms, make_room
local now = now_ms()
local h = redis.call('HMGET', lease, 'token', 'offset', 'arrived', 'done')
if h[1] ~= token then return '' end
make_room(lease)
redis.call('HSET', lease, 'until', now + ttl_ms)
if h[3] ~= h[4] then
  local last = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)
  if not last[1] or last[1][1] == h[2] then redis.call('HSET', lease, 'done', h[3] or '0', 'arrived', h[3] or '0') end
end
return h[2]
