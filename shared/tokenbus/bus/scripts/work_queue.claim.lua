-- Claim entries that have been idle for a time.
-- KEYS
--   stream  stream rw
-- ARGV
--   group
--   consumer
--   idle_ms
--   start  cursor
--   count  maximum entries
-- Reply: the next cursor, and id, deliveries and fields of each entry.
-- Atomic: the number of deliveries is that of this very claim.
-- Twice: again: entries of a lost reply are the consumer's, and are claimed again once they are idle.
local cursor, out = start, {}
for _ = 1, 100 do
  local r = redis.call('XAUTOCLAIM', stream, group, consumer, idle_ms, cursor, 'COUNT', count)
  cursor = r[1]
  for i = 1, #r[2] do
    local e = r[2][i]
    if e and e[2] then
      local p = redis.call('XPENDING', stream, group, e[1], e[1], 1)
      out[#out + 1] = {e[1], p[1][4], e[2]}
    end
  end
  if #out > 0 or cursor == '0-0' then break end
end
return {cursor, out}
