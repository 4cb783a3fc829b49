-- Claim entries whose worker does not keep them alive, and add entries that the order lacks.
-- KEYS
--   stream  stream rw
--   order  sorted set rw  waiting entries by tag
--   tenants  hash rw  next tag of each tenant
-- ARGV
--   entries  what they are: requests, turns or tools
--   group
--   consumer
--   idle_ms
--   count  most entries to claim
--   start  cursor of the repair
-- Reply: see `reclaim`.
-- Atomic: as for `take`.
-- Twice: again: as for `take`.
-- Uses: by_name, look, fair_order
-- Constants: SORTED_ENTRIES, READ_BYTES
local waiting, look_at = open_order(order, tenants), look[entries]
local most, cursor, out, aside, bytes = tonumber(count), start, {}, 0, 0
local consumers = redis.pcall('XINFO', 'CONSUMERS', stream, group)
if consumers.err then return redis.error_reply('NOGROUP ' .. consumers.err) end
for _, flat in ipairs(consumers) do
  local of = by_name(flat)
  if of.name == NOBODY then aside = of.pending
  elseif of.pending > 0 and #out < most then
    local late = redis.call('XPENDING', stream, group, 'IDLE', idle_ms, '-', '+', most - #out, of.name)
    for _, p in ipairs(late) do
      if bytes >= READ_BYTES then break end
      local entry = redis.call('XCLAIM', stream, group, consumer, idle_ms, p[1])[1]
      if entry and entry[2] then
        out[#out + 1] = {p[1], p[4] + 1, entry[2]}
        for _, text in ipairs(entry[2]) do bytes = bytes + #text end
      end
    end
  end
end
if aside > redis.call('ZCARD', order) then
  local pending = redis.call('XPENDING', stream, group, cursor, '+', SORTED_ENTRIES, NOBODY)
  cursor = pending[SORTED_ENTRIES] and '(' .. pending[SORTED_ENTRIES][1] or '-'
  for _, p in ipairs(pending) do
    if bytes >= READ_BYTES then
      cursor = p[1]
      break
    end
    if not redis.call('ZSCORE', order, p[1]) then
      local entry = redis.call('XRANGE', stream, p[1], p[1])[1]
      if entry then
        local tenant, size = look_at(entry[2])
        bytes = bytes + size
        if not queue_up(waiting, p[1], tenant, size) then break end
      else redis.call('XACK', stream, group, p[1]) end
    end
  end
end
return {cursor, keep_tags(waiting), out}
