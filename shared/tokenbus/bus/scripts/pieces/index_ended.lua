-- Move a run to the index of ended runs. The index only serves to find runs. If it cannot be written (wrong type, no
-- permission), the commit succeeds anyway.
-- Constants: MOST_FORGOTTEN
local function index_ended(open_runs, ended_runs, run, keep, now)
  redis.pcall('ZREM', open_runs, run)
  if type(redis.pcall('ZADD', ended_runs, now, run)) ~= 'number' then return end
  local gone = redis.pcall('ZRANGEBYSCORE', ended_runs, '-inf', now - keep, 'LIMIT', 0, MOST_FORGOTTEN)
  if #gone > 0 then redis.pcall('ZREM', ended_runs, unpack(gone)) end
  local left = redis.pcall('PTTL', ended_runs)
  if type(left) == 'number' and left < keep then redis.pcall('PEXPIRE', ended_runs, keep) end
end
