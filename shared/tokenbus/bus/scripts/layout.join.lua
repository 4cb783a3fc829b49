-- Agree on the deployment's layout: write it if it is missing or older, then read it.
-- KEYS
--   meta  hash rw
-- ARGV
--   partitions
--   wire_version
--   seen  field in which a worker confirms its epoch, or ''
--   epoch
--   numbers  of partitions
--   ever  every number there was
--   spread
--   durability  or ''
-- Reply: the fields of the layout.
-- Atomic: of two processes that start at once, one writes and both read the same.
-- Twice: same
if redis.call('EXISTS', meta) == 0 then
  redis.call('HSET', meta, 'partitions', partitions, 'wire_version', wire_version)
end
if tonumber(redis.call('HMGET', meta, 'epoch')[1] or '0') < tonumber(epoch) then
  redis.call('HSET', meta, 'partitions', partitions, 'wire_version', wire_version, 'epoch', epoch, 'numbers', numbers,
             'ever', ever, 'spread', spread)
end
local found = redis.call('HMGET', meta, 'partitions', 'wire_version', 'numbers', 'ever', 'spread', 'epoch', 'announced',
                         'durability')
if durability ~= '' and found[8] ~= durability then
  redis.call('HSET', meta, 'durability', durability)
  found[8] = durability
end
if seen ~= '' and found[7] then redis.call('HSET', meta, seen, epoch) end
return found
