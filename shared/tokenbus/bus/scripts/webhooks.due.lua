-- Take deliveries whose time has come.
-- KEYS
--   due  sorted set rw  deliveries by the time of their next try in ms
--   bodies  hash r  by delivery
-- ARGV
--   most  how many at most
--   lease_ms  until they are due again
-- Reply: in how many ms the next one is due, -1 if there is none; how many there are; then id and body of each.
-- Atomic: no two workers get the same delivery at once.
-- Twice: again: the second gets others; the first ones are due again after lease_ms.
-- Uses: now_ms
local now = now_ms()
local taken = {-1, 0}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', due, '-inf', now, 'LIMIT', 0, most)) do
  local body = redis.call('HGET', bodies, id)
  if body then
    redis.call('ZADD', due, now + lease_ms, id)
    taken[#taken + 1] = id
    taken[#taken + 1] = body
  else
    redis.call('ZREM', due, id)
  end
end
local first = redis.call('ZRANGE', due, 0, 0, 'WITHSCORES')
taken[2] = redis.call('ZCARD', due)
if first[2] then taken[1] = math.max(0, tonumber(first[2]) - now) end
return taken
