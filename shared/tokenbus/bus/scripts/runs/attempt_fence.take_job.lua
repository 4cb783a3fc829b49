-- Become the writer of an attempt whose job at the provider goes on.
-- KEYS
--   run_key  hash rw
-- ARGV
--   attempt
--   writer  name of the new one
-- Reply: the number of frames, the job, and how often it was taken without progress; or an empty list.
-- Atomic: frames and job are of one moment, and the earlier writer can add none after it.
-- Twice: same
local h = redis.call('HMGET', run_key, 'status', 'attempt', 'raw', 'closed', 'writer', 'job', 'job_taken')
if h[1] ~= 'open' or h[2] ~= attempt or h[4] == attempt or not h[6] then return {} end
local taken = tonumber(h[7] or '0')
if h[5] ~= writer then
  taken = taken + 1
  redis.call('HSET', run_key, 'writer', writer, 'job_taken', taken)
end
return {tonumber(h[3] or '0'), h[6], taken}
