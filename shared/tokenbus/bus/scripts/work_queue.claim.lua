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
-- Constants: MOST_STEPS, READ_BYTES
local cursor, out, bytes = start, {}, 0
for _ = 1, MOST_STEPS do
  -- One at a time: a step looks at ten entries, and claims the first that is idle.
  local r = redis.call('XAUTOCLAIM', stream, group, consumer, idle_ms, cursor, 'COUNT', 1)
  cursor = r[1]
  local e = r[2][1]
  if e and e[2] then
    local p = redis.call('XPENDING', stream, group, e[1], e[1], 1)
    out[#out + 1] = {e[1], p[1][4], e[2]}
    for _, text in ipairs(e[2]) do bytes = bytes + #text end
  end
  if cursor == '0-0' or #out >= tonumber(count) or bytes >= READ_BYTES then break end
end
return {cursor, out}
