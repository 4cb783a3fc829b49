-- Change the layout, if it has not changed since it was read.
-- KEYS
--   meta  hash rw
-- ARGV
--   epoch  before
--   announced  number or ''
--   fields...
-- Reply: 1, or 0 if the epoch is another.
-- Atomic: of two commands that run at once, one takes effect.
-- Twice: refused: 0, as if another command had changed it; its caller reads the layout again.
if redis.call('HGET', meta, 'epoch') ~= (epoch ~= '0' and epoch or false) then return 0 end
redis.call('HSET', meta, 'epoch', epoch + 1, unpack(ARGV, fields_at))
if announced ~= '' then redis.call('HSET', meta, 'announced', announced)
else
  redis.call('HDEL', meta, 'announced')
  for _, name in ipairs(redis.call('HKEYS', meta)) do
    if string.sub(name, 1, 5) == 'seen:' then redis.call('HDEL', meta, name) end
  end
end
return 1
