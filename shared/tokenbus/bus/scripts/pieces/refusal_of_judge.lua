-- Why the holder of this token of the policy stage may not write to a run; nil if it may.
local function refusal_of_judge(run_key, policy_lease, token)
  if redis.call('HGET', policy_lease, 'token') ~= token then return 'fenced' end
  local status = redis.call('HGET', run_key, 'status')
  if status ~= 'open' then return status or 'gone' end
end
