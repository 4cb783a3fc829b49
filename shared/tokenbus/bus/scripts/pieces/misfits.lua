-- Find the keys base + 1 to base + #kinds that have a wrong type, besides those in `known`, which the script has read
-- already. The second result is the error of the first of them that several runs share.
local function misfits(base, kinds, known)
  local types, alien, first = {h = 'hash', H = 'hash', s = 'stream', S = 'stream'}, {}, nil
  for k = 1, #kinds do
    local kind = string.sub(kinds, k, k)
    local found = types[kind] and not known[KEYS[base + k]] and redis.pcall('TYPE', KEYS[base + k]).ok
    if found and found ~= 'none' and found ~= types[kind] then
      alien[k] = true
      if kind == 'h' or kind == 's' then
        first = first or 'WRONGTYPE ' .. KEYS[base + k] .. ' is a ' .. found .. ', no ' .. types[kind]
      end
    end
  end
  return alien, first
end
