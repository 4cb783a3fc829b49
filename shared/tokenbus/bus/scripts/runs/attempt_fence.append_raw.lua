-- Append raw frames of several runs as one entry; each frame is checked.
-- KEYS
--   raw  stream w
--   normalizer_lease  hash rw
--   policy_lease  hash r  or the normalizer's again
--   run_keys...  hash rw
-- ARGV
--   policy_lag  whether the policy stage's lag is wanted: 1 or 0
--   parts...  of each run: its id, attempt, frame number, whether it is the last, frame, writer, job
-- Reply: a verdict for each frame, the normalizer's lag, and the policy stage's.
-- Atomic: an attempt that was closed, or that another worker makes, writes nothing, and no frame is written twice.
-- Twice: refused: 'already'
-- Uses: make_room, attempt_fence, lag_of
-- Constants: MAX_VALUES
local out, fields, writes, size, ends = {}, {}, {}, 0, false
local n = (#ARGV - parts_at + 1) / 7
for k = 1, n do
  local at = parts_at + 7 * (k - 1)
  local run, attempt, frame, final, data, writer, job = unpack(ARGV, at, at + 6)
  local verdict, checked = check_frame(KEYS[run_keys_at + k - 1], attempt, frame, writer)
  out[k] = verdict
  if checked then
    ends = ends or final == '1'
    fields[#fields + 1] = run
    fields[#fields + 1] = data
    size = size + #data
    writes[#writes + 1] = {checked, final, data, job}
  end
end
-- A full server accepts what ends an attempt; all else is answered `full`. It can refuse the first write only.
if ends then make_room(normalizer_lease) end
for i = 1, #fields, MAX_VALUES do
  local added = redis.pcall('XADD', raw, '*', unpack(fields, i, math.min(i + MAX_VALUES - 1, #fields)))
  if type(added) == 'table' and added.err then
    if not string.find(added.err, 'OOM') then return added end
    for k = 1, n do if out[k] == 'ok' then out[k] = 'full' end end
    writes = {}
    break
  end
end
for _, write in ipairs(writes) do count_frame(unpack(write)) end
if #writes > 0 then redis.call('HINCRBY', normalizer_lease, 'arrived', size) end
out[n + 1] = lag_of(normalizer_lease)
if policy_lag == '1' then out[n + 2] = lag_of(policy_lease) end
return out
