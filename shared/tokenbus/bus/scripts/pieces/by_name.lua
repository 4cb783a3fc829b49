-- A table of a reply that alternates names and values.
local function by_name(flat)
  local of = {}
  for i = 1, #flat, 2 do of[flat[i]] = flat[i + 1] end
  return of
end
