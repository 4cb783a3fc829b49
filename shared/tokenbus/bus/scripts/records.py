"""Index of debug records on the server."""

from __future__ import annotations

from tokenbus.bus.scripts.script import MAX_VALUES, NOW, ScriptCall, script

_INDEX = script(
    "index_record",
    """
-- Add a record to the index, and drop those that are too old or too many.
-- KEYS: 1 runs by time (sorted set), 2 entries by run (hash).
-- ARGV: 1 lifetime in ms, 2 most records, 3 run or '', 4 its time in ms, 5 its entry.
-- Reply: how many were dropped.
-- Atomic: both keys always hold the same runs.
"""
    + NOW
    + """
if ARGV[3] ~= '' then
  redis.call('ZADD', KEYS[1], ARGV[4], ARGV[3])
  redis.call('HSET', KEYS[2], ARGV[3], ARGV[5])
end
local gone = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[1], 'LIMIT', 0, MAX_VALUES)
local over = math.min(redis.call('ZCARD', KEYS[1]) - ARGV[2], MAX_VALUES)
if over > #gone then gone = redis.call('ZRANGE', KEYS[1], 0, over - 1) end
if #gone > 0 then
  redis.call('ZREM', KEYS[1], unpack(gone))
  redis.call('HDEL', KEYS[2], unpack(gone))
end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
redis.call('PEXPIRE', KEYS[2], ARGV[1])
return #gone
""".replace("MAX_VALUES", str(MAX_VALUES)),
)


def index_record(
    index: str, entries: str, *, keep_ms: int, most: int, run: str = "", at_ms: int = 0, entry: bytes = b""
) -> ScriptCall:
    """Add a run's record to the index, replacing an earlier one of the run, and drop records that are too old or too
    many.

    Without ``run`` it only drops. Reply: how many were dropped.
    """
    return ScriptCall(_INDEX, [index, entries], [keep_ms, most, run, at_ms, entry])
