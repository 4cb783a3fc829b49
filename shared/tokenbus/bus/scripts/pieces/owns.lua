-- Whether the consumer owns the entry. If the group is missing (NOGROUP), nothing is pending: the error of pcall has no
-- first element.
local function owns(stream, group, consumer, id)
  return redis.pcall('XPENDING', stream, group, id, id, 1, consumer)[1]
end
