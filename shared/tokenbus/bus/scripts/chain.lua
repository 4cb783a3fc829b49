-- Write raw frames as one entry, with what two chained stages commit on it.
-- KEYS
--   lease_one  hash rw
--   input_one  stream rw
--   lease_two  hash rw
--   input_two  stream rw
--   policy_lease  hash r  or the first lease again
--   others...  any rw  the runs' hashes, the keys of the first commit, those of the second
-- ARGV
--   token_one
--   token_two
--   begin_one  committed offset
--   seen_one  last applied entry
--   begin_two
--   seen_two
--   ttl_ms  of the leases
--   watermark_one  or '': the entry that this call writes
--   watermark_two
--   count_one  entries
--   size_one  their bytes
--   count_two
--   size_two
--   mirror_one  generation of the server, group that shows the offset
--   mirror_two
--   topic_entries  entries kept in a topic
--   flush  name of the flush
--   policy_lag  whether the policy stage's lag is wanted: 1 or 0
--   kinds_one  of the first commit's keys
--   kinds_two
--   runs  how many
--   operations_one  how many values the first commit's operations are
--   rest...  of each run: its id, attempt, frame number, whether it is the last, frame, writer, job;
--     then the operations of both commits
-- Reply: see `chain`.
-- Atomic: outputs exist only if the frames do, and neither if a lease, an offset or an attempt is another's.
-- Twice: refused: 'already'
-- Uses: now_ms, make_room, attempt_fence, misfits, operate, move_offset, lag_of
-- Constants: MOST_UNREAD
local now, n = now_ms(), tonumber(runs)
local one = redis.call('HMGET', lease_one, 'token', 'offset', 'flush', 'entries', 'done', 'owed', 'watermark')
local two = redis.call('HMGET', lease_two, 'token', 'offset', 'entries', 'done', 'owed', 'watermark')
if one[1] ~= token_one or two[1] ~= token_two then return {'fenced', one[1] or '0', two[1] or '0'} end
if one[3] == flush then return {'already', one[2], two[2]} end
local owing = (one[6] or '') ~= '' or (two[5] or '') ~= ''
if owing or one[2] ~= begin_one or two[2] ~= begin_two then return {'moved', one[2] or '0-0', two[2] or '0-0'} end
local function unread(stream, begin, seen)
  local found = redis.call('XRANGE', stream, '(' .. seen, '+', 'COUNT', MOST_UNREAD)
  if #found == 0 and seen ~= begin and not redis.call('XRANGE', stream, seen, seen)[1] then return nil end
  return found
end
local of_one, of_two = unread(input_one, begin_one, seen_one), unread(input_two, begin_two, seen_two)
if not of_one or not of_two then return {'gone'} end
if #of_one > 0 or #of_two > 0 then return {'unread', of_one, of_two} end
-- A key of a wrong type that was read is an error already, before any write.
local known = {[lease_one] = true, [input_one] = true, [lease_two] = true, [input_two] = true}
local fields, writes, size, ends, at = {}, {}, 0, false, rest_at
for k = 1, n do
  local run, attempt, frame, final, data, writer, job = unpack(ARGV, at, at + 6)
  at = at + 7
  local key = KEYS[others_at + k - 1]
  known[key] = true
  local _, checked = check_frame(key, attempt, frame, writer)
  if not checked or frame == '-1' then return {'refused', run} end
  ends = ends or final == '1'
  fields[#fields + 1] = run
  fields[#fields + 1] = data
  size = size + #data
  writes[k] = {checked, final, data, job}
end
local base_one = others_at - 1 + n
local base_two = base_one + #kinds_one
local alien_one, alien_two = misfits(base_one, kinds_one, known), misfits(base_two, kinds_two, known)
if next(alien_one) or next(alien_two) then return {'misfit'} end
-- A full server accepts what ends an attempt. It can refuse the first write only.
if ends then make_room(lease_one) end
local raw = redis.pcall('XADD', input_one, '*', unpack(fields))
if type(raw) == 'table' and raw.err then
  if string.find(raw.err, 'OOM') then return {'full'} end
  return raw
end
for _, write in ipairs(writes) do count_frame(unpack(write)) end
redis.call('HINCRBY', lease_one, 'arrived', size)
local added, last_of_one = {}, at + operations_one - 1
operate(at, last_of_one, base_one, alien_one, topic_entries, now, nil, added)
operate(last_of_one + 1, #ARGV, base_two, alien_two, topic_entries, now, nil, added)
local events = added[input_two] or seen_two
local till = now + ttl_ms
local read, done = (one[4] or 0) + count_one, (one[5] or 0) + size_one
local watermark = watermark_one ~= '' and watermark_one or raw
move_offset(lease_one, input_one, raw, one[7], watermark, till, read, done, mirror_one, 'flush', flush)
if events ~= begin_two then
  read, done = (two[3] or 0) + count_two, (two[4] or 0) + size_two
  watermark = watermark_two ~= '' and watermark_two or events
  move_offset(lease_two, input_two, events, two[6], watermark, till, read, done, mirror_two)
end
if policy_lag == '1' then return {'ok', raw, events, lag_of(policy_lease)} end
return {'ok', raw, events}
