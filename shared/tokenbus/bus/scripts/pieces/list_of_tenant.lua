-- List an open run in its tenant's index, which lives as long as an open run's hash does. What was lost of it before
-- goes after some such lifetimes.
-- Constants: MOST_FORGOTTEN, LIFETIMES
local function list_of_tenant(open_runs, run, accepted, ttl)
  if type(redis.pcall('ZADD', open_runs, 'NX', accepted, run)) ~= 'number' then return end
  local gone = redis.pcall('ZRANGEBYSCORE', open_runs, '-inf', accepted - LIFETIMES * ttl, 'LIMIT', 0, MOST_FORGOTTEN)
  if #gone > 0 then redis.pcall('ZREM', open_runs, unpack(gone)) end
  redis.pcall('PEXPIRE', open_runs, ttl)
end
