-- Append requests to the inbound stream while it has room.
-- KEYS
--   stream  stream rw
-- ARGV
--   requests...  of each: longest length of the stream, request, tenant or ''
-- Reply: the id of each entry; false if the stream is full.
-- Atomic: many clients at once do not fill the stream beyond its length.
-- Twice: again: a request has an id; one that is delivered twice creates one run.
-- Constants: DATA_FIELD, TENANT_FIELD
local out = {}
for i = requests_at, #ARGV, 3 do
  local id = false
  if redis.call('XLEN', stream) < tonumber(ARGV[i]) then
    local fields = {DATA_FIELD, ARGV[i + 1]}
    if ARGV[i + 2] ~= '' then fields[3], fields[4] = TENANT_FIELD, ARGV[i + 2] end
    id = redis.call('XADD', stream, '*', unpack(fields))
  end
  out[#out + 1] = id
end
return out
