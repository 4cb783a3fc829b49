-- Store a key's entry, unless it has changed since it was read.
-- KEYS
--   keys  hash rw
-- ARGV
--   key_id
--   before  its entry before, or ''
--   entry
-- Reply: 1 if it was stored, else 0.
-- Atomic: of two writers that read the same entry, one stores.
-- Twice: refused: 0, as if another writer had stored.
if (redis.call('HGET', keys, key_id) or '') ~= before then return 0 end
redis.call('HSET', keys, key_id, entry)
return 1
