-- Commit one batch of a stage: its outputs, its offset and its watermark.
-- KEYS
--   lease  hash rw
--   stream  stream rw  the stage's input
--   others...  any rw  the keys that the operations name, from the third on; the first two are the lease and the input
-- ARGV
--   token
--   ttl_ms  of the lease
--   begin  offset before
--   till  offset after
--   watermark
--   count  entries
--   size  their bytes
--   mirror  generation of the server, group that shows the offset
--   topic_entries  entries kept in a topic
--   kinds  of all keys
--   owed  what the partition owes until then
--   owes  and afterwards
--   operations...
-- Reply: see `Commit`.
-- Atomic: outputs and offset move together, and only for the owner of the lease: that makes each output exactly once.
-- Twice: refused: 'already'
-- Uses: now_ms, make_room, misfits, operate, move_offset
local now = now_ms()
local h = redis.call('HMGET', lease, 'token', 'offset', 'entries', 'done', 'owed', 'watermark')
if h[1] ~= token then return {'fenced', h[1] or '0'} end
if h[2] ~= begin then
  if h[2] == till then return {'already', h[2]} end
  return {'moved', h[2]}
end
local owing = h[5] or ''
if owing ~= owed then
  if owing == owes then return {'already', h[2]} end
  return {'moved', h[2]}
end
if string.sub(mirror, 2) ~= '' and begin ~= till and not redis.call('XRANGE', stream, till, till)[1] then
  return {'gone', till}
end
local alien, wrong = misfits(0, kinds, {[lease] = true})
if wrong then return redis.error_reply(wrong) end
make_room(lease)
local lags = {}
operate(operations_at, #ARGV, 0, alien, topic_entries, now, lags, {})
local read, done = (h[3] or 0) + count, (h[4] or 0) + size
if owing ~= owes then redis.call('HSET', lease, 'owed', owes) end
move_offset(lease, stream, till, h[6], watermark, now + ttl_ms, read, done, mirror)
return {'ok', till, unpack(lags)}
