-- The unread bytes of a stage's input.
local function lag_of(lease)
  local counted = redis.call('HMGET', lease, 'arrived', 'done')
  return tonumber(counted[1] or '0') - tonumber(counted[2] or '0')
end
