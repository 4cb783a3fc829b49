-- Return the consumer's own entries to the order, as if never delivered.
-- KEYS
--   stream  stream rw
--   order  sorted set rw  waiting entries by tag
--   tenants  hash rw  next tag of each tenant
-- ARGV
--   entries  what they are: requests, turns or tools
--   group
--   consumer
--   in_front  whether they go first: 1 or 0
--   ids...
-- Reply: how many were the consumer's.
-- Atomic: as for `take`; an entry that another worker owns stays with it.
-- Twice: refused: 0, for `NOBODY` owns them.
-- Uses: owns, look, fair_order
local waiting, ours = open_order(order, tenants), {}
for i = ids_at, #ARGV do
  local id = ARGV[i]
  if owns(stream, group, consumer, id) then
    -- If there is no room now, `reclaim` adds it later. One that has been deleted is dropped by `take`.
    if in_front == '1' then redis.pcall('ZADD', order, whole(waiting.first), id)
    else
      local entry = redis.call('XRANGE', stream, id, id)[1]
      if entry then
        local tenant, size = look[entries](entry[2])
        queue_up(waiting, id, tenant, size)
      end
    end
    ours[#ours + 1] = id
  end
end
put_aside(stream, group, ours)
keep_tags(waiting)
return #ours
