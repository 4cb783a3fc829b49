-- Add an entry to the dead stream.
-- KEYS
--   dead  stream w
--   added  any rw  what is left of an earlier try
-- ARGV
--   most  entries
--   keep_ms  how long a later try finds that this one added the entry
--   data  entry
-- Reply: the entry's id, or '' if an earlier try added it.
-- Atomic: the entry and the mark that it was added are one write.
-- Twice: refused: '', because of the mark.
-- Constants: DATA_FIELD
if redis.call('EXISTS', added) == 1 then return '' end
local id = redis.call('XADD', dead, 'MAXLEN', '~', most, '*', DATA_FIELD, data)
redis.call('SET', added, '', 'PX', keep_ms)
return id
