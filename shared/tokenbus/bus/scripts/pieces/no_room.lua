-- The error of a server that has no room for further runs, or nil.
-- Constants: RUNS_SHARE
local function no_room()
  local memory = redis.call('INFO', 'memory')
  local used, most = string.match(memory, 'used_memory:(%d+)'), string.match(memory, 'maxmemory:(%d+)')
  if tonumber(most or '0') > 0 and tonumber(used) > tonumber(most) * RUNS_SHARE then
    return redis.error_reply('OOM no room for further runs: what is left is for those that are open')
  end
end
