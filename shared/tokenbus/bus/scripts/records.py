"""Index of debug records on the server."""

from __future__ import annotations

from tokenbus.bus.scripts.script import MAX_VALUES, ScriptCall, script


@script(MAX_VALUES=MAX_VALUES)
def index_record(
    index: str, entries: str, *, keep_ms: int, most: int, run: str = "", at_ms: int = 0, entry: bytes = b""
) -> ScriptCall:
    """Add a run's record to the index, replacing an earlier one of the run, and drop records that are too old or too
    many.

    Without ``run`` it only drops. Reply: how many were dropped.
    """
    ...
