-- Move a stage's offset. `read`, `done`: entries and bytes, all that the stage has processed now. `mirror`: the
-- server's generation ('7' or '6') and the group that shows the offset. `before`: the watermark until now, up to which
-- the stream is trimmed already. Further arguments: more fields of the lease.
local function move_offset(lease, stream, offset, before, watermark, till, read, done, mirror, ...)
  redis.call('HSET', lease, 'offset', offset, 'watermark', watermark, 'until', till, 'entries', read, 'done', done, ...)
  local group = string.sub(mirror, 2)
  if group == '' then return end
  if string.sub(mirror, 1, 1) == '7' then
    redis.pcall('XGROUP', 'SETID', stream, group, offset, 'ENTRIESREAD', read)
  else
    redis.pcall('XGROUP', 'SETID', stream, group, offset)
  end
  -- An input that other readers share has no watermark; its reader needs no permission to trim.
  if watermark ~= '0-0' and watermark ~= before then redis.call('XTRIM', stream, 'MINID', '~', watermark) end
end
