"""Counts of a deployment's activity: one hash for each few seconds of the last hour, written by the parsers."""

from __future__ import annotations

from collections.abc import Mapping

from tokenbus.bus.scripts.script import MAX_VALUES, ScriptCall, script

KEPT_MS = 3_700_000
"""A little more than the hour that is shown."""

_COUNT = script(
    "count_activity",
    """
-- Add to the counts of a time slot, and set its levels.
-- KEYS: 1 time slot (hash).
-- ARGV: 1 lifetime in ms, 2 number of counts, 3 and further: field and value of each count, then of each level.
-- Reply: 1.
-- Atomic: a reader never sees a part of one worker's counts, and the key never lacks its lifetime.
for i = 3, 2 + 2 * ARGV[2], 2 do redis.call('HINCRBY', KEYS[1], ARGV[i], ARGV[i + 1]) end
for i = 3 + 2 * ARGV[2], #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 1
""",
)


def count_activity(key: str, counts: Mapping[str, int], levels: Mapping[str, int]) -> ScriptCall:
    """Add to the counts of a time slot, and set levels. At most `MAX_VALUES` of both."""
    fields = [value for field in (*counts.items(), *levels.items()) for value in field]
    assert len(fields) <= 2 * MAX_VALUES
    return ScriptCall(_COUNT, [key], [KEPT_MS, len(counts), *fields])
