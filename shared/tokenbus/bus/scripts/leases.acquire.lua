-- Acquire a partition's lease if it is free, expired or already the worker's.
-- KEYS
--   lease  hash rw
--   stream  stream rw  the stage's input
-- ARGV
--   owner
--   ttl_ms
--   start  where a new group begins: an id or $
--   mirror  group that shows the offset, or ''
-- Reply: token, offset, watermark, the token before; an empty token and the owner if another worker holds it.
-- Atomic: between the check of the owner and the new token, no other worker can acquire it.
-- Twice: again: the owner gets a newer token and uses that; the earlier one is fenced.
-- Uses: now_ms, make_room
local now = now_ms()
local h = redis.call('HMGET', lease, 'owner', 'until', 'token', 'offset', 'watermark')
if h[1] and h[1] ~= owner and tonumber(h[2] or '0') > now then return {'', h[1], ''} end
local last = tonumber(string.match(h[3] or '0', '^%d+'))
local token = string.format('%.0f:%s', math.max(last + 1, now), owner)
local offset, watermark = h[4], h[5]
if not offset then
  offset = '0-0'
  if start == '$' then
    local newest = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)
    if newest[1] then offset = newest[1][1] end
  end
  watermark = offset
end
make_room(lease)
redis.call('HSET', lease, 'owner', owner, 'until', now + ttl_ms, 'token', token,
           'offset', offset, 'watermark', watermark)
if mirror ~= '' then redis.pcall('XGROUP', 'CREATE', stream, mirror, offset, 'MKSTREAM') end
return {token, offset, watermark, h[3] or ''}
