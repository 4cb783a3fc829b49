-- Two buckets of a client, `requests` and `tokens`: each a level and the time of that level.
local function level(hash, name, most, now)
  local stored = redis.call('HMGET', hash, name, name .. ':at')
  local was, at = tonumber(stored[1]), tonumber(stored[2])
  if not was or not at then return most end
  return math.min(most, was + math.max(0, now - at) * most / 60000)
end
local function set_level(hash, name, most, left, now)
  redis.call('HSET', hash, name, string.format('%.6f', left), name .. ':at', string.format('%.0f', now))
  local full = math.ceil((most - left) * 60000 / most) + 1000
  if redis.call('PTTL', hash) < full then redis.call('PEXPIRE', hash, string.format('%.0f', full)) end
end
