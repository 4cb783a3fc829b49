"""Scripts of those who read a topic from a cursor."""

from __future__ import annotations

from collections.abc import Sequence

from tokenbus.bus.scripts.script import ALONE, ScriptCall, script
from tokenbus.bus.scripts.work_queue import READ_BYTES

STREAMS = 8
"""Most streams of one call of `ends` or `trimmed`."""
_READS = 250
"""Weight of a stream whose first or last entry is read."""
COUNTED_ENTRIES = 2000
"""Maximum entries that one call of `mirror_offset` counts."""


@script(weight=_READS)
def ends(streams: Sequence[str]) -> ScriptCall:
    """The last entry id of each stream; ``0-0`` if it is empty."""
    ...


@script(weight=_READS)
def trimmed(streams: Sequence[str], *, cursors: Sequence[str]) -> ScriptCall:
    """For each stream and its cursor: empty, or the oldest entry kept if entries after the cursor may be gone
    (``none``: the stream is empty).

    ``0-0`` stands for a stream that had no entries yet; trimming since then is detectable from Redis 7 on
    (entries-added). A cursor just before the oldest entry is the end of a gap that was already reported.
    """
    ...


@script(weight=ALONE, COUNTED_ENTRIES=COUNTED_ENTRIES, READ_BYTES=READ_BYTES)
def mirror_offset(
    lease: str, stream: str, *, group: str, offset: str, after: str | bytes, counted: int = 0
) -> ScriptCall:
    """Set the group's entry count up to ``offset`` and mirror both, once all entries after the offset are counted. Does
    nothing if the server does not count entries (Redis 6.2).

    ``after``: the offset, then what the call before replied, with ``counted``. Reply: both for the next call, the first
    empty if there is none.
    """
    ...
