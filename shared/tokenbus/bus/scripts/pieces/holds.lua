-- What a client's budget holds back for open runs: `held` has the amount of each run and, in the field '', their sum;
-- `ends` has the time at which each expires.
-- Uses: whole
local function held_in_all(held)
  return tonumber(redis.call('HGET', held, '') or '0')
end
-- Hold this amount for a run from now on, in place of what was held. 0: nothing. Without `expiry`: as long as before.
local function set_hold(held, ends, run, amount, expiry)
  local was = tonumber(redis.call('HGET', held, run) or '0')
  if amount > 0 then
    redis.call('HSET', held, run, whole(amount))
    if expiry then redis.call('ZADD', ends, whole(expiry), run) end
  else
    redis.call('HDEL', held, run)
    redis.call('ZREM', ends, run)
  end
  redis.call('HINCRBY', held, '', whole(amount - was))
end
local function keep_holds(held, ends, keep_ms)
  redis.call('PEXPIRE', held, keep_ms)
  redis.call('PEXPIRE', ends, keep_ms)
end
