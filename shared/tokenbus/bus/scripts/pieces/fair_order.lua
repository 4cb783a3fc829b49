-- The order of a queue's waiting entries: entry ids by tag in `order`, each tenant's next tag in `tenants`.
-- Uses: whole
-- Constants: NOBODY, HANDED_BACK_MS, COST_BYTES, SPARE_TENANTS
local function open_order(order, tenants)
  redis.call('ZREM', order, '')  -- as `make_room` does: a full server must still hand out work that frees memory
  local first = tonumber(redis.call('ZRANGE', order, 0, 0, 'WITHSCORES')[2] or '0')
  return {order = order, tenants = tenants, first = first, next_tags = {}}
end
local function queue_up(waiting, id, tenant, size)
  -- False if the server has no room for it.
  local tag = waiting.next_tags[tenant] or tonumber(redis.call('HGET', waiting.tenants, tenant) or '0')
  tag = math.max(waiting.first, tag)
  local added = redis.pcall('ZADD', waiting.order, 'NX', whole(tag), id)
  if type(added) == 'table' then return false end
  if added == 1 then waiting.next_tags[tenant] = tag + 1 + math.floor(size / COST_BYTES) end
  return true
end
local function keep_tags(waiting)
  local count, tenants = redis.call('ZCARD', waiting.order), waiting.tenants
  if count == 0 then
    redis.call('UNLINK', tenants)
    return 0
  end
  for tenant, tag in pairs(waiting.next_tags) do redis.call('HSET', tenants, tenant, whole(tag)) end
  if redis.call('HLEN', tenants) > 2 * count + SPARE_TENANTS then  -- a tag behind the smallest one has no effect
    local flat, gone = redis.call('HRANDFIELD', tenants, SPARE_TENANTS, 'WITHVALUES'), {}
    for i = 1, #flat, 2 do if tonumber(flat[i + 1]) <= waiting.first then gone[#gone + 1] = flat[i] end end
    if #gone > 0 then redis.call('HDEL', tenants, unpack(gone)) end
  end
  return count
end
local function put_aside(stream, group, ids, ...)
  if #ids == 0 then return end
  local args = {'XCLAIM', stream, group, NOBODY, 0}
  for _, id in ipairs(ids) do args[#args + 1] = id end
  for _, word in ipairs({'IDLE', HANDED_BACK_MS, 'RETRYCOUNT', 0, 'JUSTID', ...}) do args[#args + 1] = word end
  redis.call(unpack(args))
end
