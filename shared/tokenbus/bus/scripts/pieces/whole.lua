-- Format a number as text without the exponent that Lua would use.
local function whole(x) return string.format('%.0f', x) end
