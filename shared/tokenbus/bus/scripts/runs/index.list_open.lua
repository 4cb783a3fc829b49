-- List runs as open.
-- KEYS
--   open_runs  sorted set w
--   runs...  hash rw + sorted set rw  of each run its hash and its tenant's open runs (or the first key again)
-- ARGV
--   ttl_ms  lifetime of an open run
--   facts...  of each run: its id, time of acceptance in ms, provider, model and tenant
-- Reply: the runs that are listed now.
-- Atomic: a run that ends is not listed again afterwards.
-- Twice: same
-- Uses: list_of_tenant
local done = {}
for k = runs_at, #KEYS, 2 do
  local a = facts_at + (k - runs_at) / 2 * 5
  local run, accepted = ARGV[a], ARGV[a + 1]
  local status = redis.pcall('HGET', KEYS[k], 'status')
  if status == 'open' or status == 'cancelling' or status == 'expiring' then
    if KEYS[k + 1] ~= open_runs then list_of_tenant(KEYS[k + 1], run, accepted, ttl_ms) end
    if type(redis.pcall('ZADD', open_runs, 'NX', accepted, run)) == 'number' then
      for i, field in ipairs({'accepted', 'provider', 'model', 'tenant'}) do
        if ARGV[a + i] ~= '' then redis.pcall('HSETNX', KEYS[k], field, ARGV[a + i]) end
      end
      done[#done + 1] = run
    end
  end
end
return done
