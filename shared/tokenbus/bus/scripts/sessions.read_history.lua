-- Read pieces of a session's history, those of its newest runs first.
-- KEYS
--   history  hash r
-- ARGV
--   before  number of the run before which they are
--   oldest  the last of them
--   most_runs
--   most_bytes  of the pieces of all of them; those of the first are read whatever they have
--   fields...  of the hash, to read besides
-- Reply: the values of the fields; and of each run `add`, `in`, `out`, `heard`, `steer`.
-- Atomic: the fields are of the same moment as the pieces.
-- Twice: reads
local names = ARGV[fields_at] and redis.call('HMGET', history, unpack(ARGV, fields_at)) or {}
local from = math.max(tonumber(oldest), tonumber(redis.call('HGET', history, 'begins_at') or '0'))
local pieces, left = {}, tonumber(most_bytes)
for n = tonumber(before) - 1, math.max(from, before - most_runs), -1 do
  local at = string.format(':%d', n)
  local of = {'add' .. at, 'in' .. at, 'out' .. at, 'heard' .. at, 'steer' .. at}
  for _, name in ipairs(of) do left = left - redis.call('HSTRLEN', history, name) end
  if left < 0 and #pieces > 0 then break end
  for _, piece in ipairs(redis.call('HMGET', history, unpack(of))) do pieces[#pieces + 1] = piece end
end
return {names, pieces}
