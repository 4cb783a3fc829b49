-- Find type and id of a request in an entry that cannot be read.
-- KEYS
--   stream  stream r
-- ARGV
--   entry  its id
-- Reply: type and id, or ''.
-- Atomic: not needed; as for `field_sizes`.
-- Twice: reads
-- Constants: NAME_BYTES, MAX_STEPS, SEARCHED_BYTES
local fields, data, from = redis.call('XRANGE', stream, entry, entry)[1], '', 1
for i = 1, fields and #fields[2] or 0, 2 do
  if fields[2][i] == '__data__' then data = fields[2][i + 1] end
end
if string.sub(data, 1, 4) == '\137BIN' then  -- FastStream's format: where the body begins
  local a, b, c, d = string.byte(data, 15, 18)
  if d then from = ((a * 256 + b) * 256 + c) * 256 + d + 1 end
end
data = string.sub(data, from, from + SEARCHED_BYTES - 1)
local depth, at, steps, found, key, last = 0, 1, 0, {}, nil, nil
while steps < MAX_STEPS and not (found.id and found.type) do
  local i = string.find(data, '["{}%[%]:,]', at)
  if not i then break end
  local mark = string.sub(data, i, i)
  at, steps = i + 1, steps + 1
  if mark == '"' then
    local stop = string.find(data, '["\\]', at)
    while stop and string.sub(data, stop, stop) == '\\' and steps < MAX_STEPS do
      stop, steps = string.find(data, '["\\]', stop + 2), steps + 1
    end
    if not stop then break end
    if depth == 1 then
      local text = string.sub(data, i + 1, math.min(stop - 1, i + NAME_BYTES))
      if key == 'id' or key == 'type' then found[key] = text end
      last = text
    end
    at = stop + 1
  elseif mark == '{' or mark == '[' then depth = depth + 1
  elseif mark == '}' or mark == ']' then depth = depth - 1
  elseif depth == 1 then key = mark == ':' and last or nil
  end
end
return {found.type or '', found.id or ''}
