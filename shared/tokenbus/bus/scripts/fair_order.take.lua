-- Put unread entries in order, then take those whose turn it is.
-- KEYS
--   stream  stream rw
--   order  sorted set rw  waiting entries by tag
--   tenants  hash rw  next tag of each tenant
-- ARGV
--   entries  what they are: requests, turns or tools
--   group
--   consumer
--   count  most entries to take
-- Reply: see `take`.
-- Atomic: two workers never sort or take the same entry, and stream, order and tags agree.
-- Twice: again: entries of a lost reply are the consumer's, and are claimed again once they are idle.
-- Uses: by_name, look, fair_order
-- Constants: SORTED_ENTRIES, READ_BYTES, NEWEST_ENTRIES
local waiting, look_at = open_order(order, tenants), look[entries]
count = tonumber(count)
local last = nil
for _, flat in ipairs(redis.pcall('XINFO', 'GROUPS', stream)) do
  local of = by_name(flat)
  if of.name == group then last = of['last-delivered-id'] end
end
if not last then return redis.error_reply('NOGROUP no consumer group ' .. group) end

local behind, urgent, seen, bytes, room, more = {}, {}, 0, 0, true, true
while room and more and seen < SORTED_ENTRIES and bytes < READ_BYTES do
  -- One at a time, for each may be large.
  local entry = redis.call('XRANGE', stream, '(' .. last, '+', 'COUNT', 1)[1]
  more = entry ~= nil
  if entry then
    local tenant, size, now = look_at(entry[2])
    if now then urgent[#urgent + 1] = {entry[1], 1, entry[2]}
    else
      room = queue_up(waiting, entry[1], tenant, size)
      if not room then break end
      behind[#behind + 1] = entry[1]
    end
    last, seen, bytes = entry[1], seen + 1, bytes + size
  end
end
put_aside(stream, group, behind, 'FORCE', 'LASTID', last)
local function overtake(entry, ...)
  redis.call('XCLAIM', stream, group, consumer, 0, entry[1], 'RETRYCOUNT', 1, 'FORCE', 'JUSTID', ...)
end
for _, entry in ipairs(urgent) do overtake(entry, 'LASTID', last) end
if room and more then
  -- A later call finds these again and hands out those that are not done by then. A second cancel does no harm.
  local newest, stop = '+', bytes + READ_BYTES / 4
  for _ = 1, NEWEST_ENTRIES do
    local entry = bytes < stop and redis.call('XREVRANGE', stream, newest, '(' .. last, 'COUNT', 1)[1]
    if not entry then break end
    local _, size, now = look_at(entry[2])
    newest, bytes = '(' .. entry[1], bytes + size
    if now then
      overtake(entry)
      urgent[#urgent + 1] = {entry[1], 1, entry[2]}
    end
  end
end

local taken, stop = {}, bytes + READ_BYTES
for _ = 1, SORTED_ENTRIES do
  local id = #taken < count and bytes < stop and redis.call('ZRANGE', order, 0, 0)[1]
  if not id then break end
  redis.call('ZREM', order, id)
  -- An entry that is not idle was claimed without the order.
  local entry = redis.call('XCLAIM', stream, group, consumer, HANDED_BACK_MS / 2, id)[1]
  if entry and entry[2] then
    taken[#taken + 1] = {id, 1, entry[2]}
    for _, text in ipairs(entry[2]) do bytes = bytes + #text end
  end
end
return {keep_tags(waiting), room and more and 1 or 0, urgent, taken}
