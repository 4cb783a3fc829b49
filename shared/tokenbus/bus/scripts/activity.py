"""Counts of a deployment's activity: one hash for each few seconds of the last hour, written by the parsers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenbus.bus.scripts.script import MAX_VALUES, Arg, ScriptCall, script

KEPT_MS = 3_700_000
"""A little more than the hour that is shown."""


def count_activity(key: str, counts: Mapping[str, int], levels: Mapping[str, int]) -> ScriptCall:
    """Add to the counts of a time slot, and set levels. At most `MAX_VALUES` of both."""
    fields = [value for field in (*counts.items(), *levels.items()) for value in field]
    assert len(fields) <= 2 * MAX_VALUES
    return _count_activity(key, kept_ms=KEPT_MS, counts=len(counts), fields=fields)


@script()
def _count_activity(slot: str, *, kept_ms: int, counts: int, fields: Sequence[Arg]) -> ScriptCall: ...
