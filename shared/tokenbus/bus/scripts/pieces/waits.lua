-- Open and close a wait: its field of the run's hash, and its line in the indexes of waits. An index only serves to
-- find waits: if it cannot be written, the wait is open all the same.
-- Constants: MOST_FORGOTTEN
local function open_wait(run_key, indexes, run, wait, record, since, keep)
  if redis.call('HSET', run_key, 'wait:' .. wait, record) == 1 then
    redis.call('HSET', run_key, 'waits', (redis.call('HGET', run_key, 'waits') or ' ') .. wait .. ' ')
  end
  for _, index in ipairs(indexes) do
    if type(redis.pcall('ZADD', index, since, run .. '/' .. wait)) == 'number' then
      local gone = redis.pcall('ZRANGEBYSCORE', index, '-inf', since - keep, 'LIMIT', 0, MOST_FORGOTTEN)
      if #gone > 0 then redis.pcall('ZREM', index, unpack(gone)) end
      redis.pcall('PEXPIRE', index, keep)
    end
  end
end
local function close_wait(run_key, indexes, run, wait)
  redis.call('HDEL', run_key, 'wait:' .. wait)
  local names = redis.call('HGET', run_key, 'waits') or ''
  local from, till = string.find(names, ' ' .. wait .. ' ', 1, true)
  if from then
    names = string.sub(names, 1, from) .. string.sub(names, till + 1)
    if names == ' ' then redis.call('HDEL', run_key, 'waits') else redis.call('HSET', run_key, 'waits', names) end
  end
  for _, index in ipairs(indexes) do redis.pcall('ZREM', index, run .. '/' .. wait) end
end
