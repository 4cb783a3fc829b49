-- Tenant, size and urgency of a queue's entry, by what the queue's entries are.
-- Constants: TENANT_FIELD, TENANT_CHARS, URGENT_BYTES, LOOKED_AT_BYTES
local function quoted(text, from, name, rest)
  -- The place behind a key: `"name` with or without the backslashes of an envelope, and what must follow.
  local at = string.find(text, '"' .. name, from, true)
  for _ = 1, 16 do
    if not at then return end
    local s, e, found = string.find(text, '^"' .. name .. '\\?"%s*:%s*' .. rest, at)
    if s then return e + 1, found end
    at = string.find(text, '"' .. name, at + 1, true)
  end
end
local look = {}
function look.requests(fields)
  local data, tenant = '', nil
  for i = 1, #fields, 2 do
    if fields[i] == '__data__' then data = fields[i + 1]
    elseif fields[i] == TENANT_FIELD then tenant = fields[i + 1] end
  end
  -- A cancel, at the top level or nested, in JSON or msgpack. Decoding the request decides.
  local urgent = #data <= URGENT_BYTES
    and string.find(data, 'cancel', 1, true)
    and (string.find(data, '"type\\?"%s*:%s*\\?"cancel\\?"') or string.find(data, '\164type\166cancel', 1, true))
  local size = #data
  -- The metadata of a large request is at one of its ends, or its tenant is a field of the entry.
  if size > 2 * LOOKED_AT_BYTES then
    data = string.sub(data, 1, LOOKED_AT_BYTES) .. string.sub(data, -LOOKED_AT_BYTES)
  end
  if not tenant then
    local inside = quoted(data, 1, 'metadata', '{')
    if inside then
      local _, found = quoted(data, inside, 'tenant', '\\?"([^"]*)')
      tenant = found
    else  -- a msgpack map, whose short texts have their length in one byte
      local _, e = string.find(data, '\168metadata', 1, true)
      if e then _, e = string.find(data, '\166tenant', e, true) end
      local chars = e and string.byte(data, e + 1)
      if chars and chars >= 160 and chars <= 191 then tenant = string.sub(data, e + 2, e + 1 + chars - 160) end
    end
  end
  return string.sub(tenant or '', 1, TENANT_CHARS), size, urgent
end
function look.turns(fields)
  local ok, work = pcall(cmsgpack.unpack, fields[2] or '')
  if not ok or type(work) ~= 'table' or type(work[5]) ~= 'string' then return '', 0, false end
  -- Runs under policies count apart, as they do where they wait in a fetcher.
  return string.sub(work[5], 1, TENANT_CHARS) .. (work[6] == true and ' held' or ''), 0, false
end
function look.tools(fields)
  local frame = fields[2] or ''
  local ok, work = pcall(cmsgpack.unpack, frame)
  if not ok or type(work) ~= 'table' or type(work[9]) ~= 'string' then return '', #frame, false end
  return string.sub(work[9], 1, TENANT_CHARS), #frame, false
end
