-- Let a script that ends runs, frees memory or keeps a worker's claim write on a full server. Precedes its first write.
-- A server above its `maxmemory` refuses commands that may take memory, unless the script has written already (every
-- version does: https://github.com/redis/redis/issues/8478). Redis 7 has a flag for this, 6.2 has not; a HDEL that
-- deletes nothing works in both. The key must be a hash or missing.
local function make_room(hash) redis.call('HDEL', hash, '') end
