"""Scripts of those who read a topic from a cursor."""

from __future__ import annotations

from collections.abc import Sequence

from tokenbus.bus.scripts.script import ScriptCall, script


@script()
def ends(streams: Sequence[str]) -> ScriptCall:
    """The last entry id of each stream; ``0-0`` if it is empty."""
    ...


@script()
def trimmed(streams: Sequence[str], *, cursors: Sequence[str]) -> ScriptCall:
    """For each stream and its cursor: empty, or the oldest entry kept if entries after the cursor may be gone
    (``none``: the stream is empty).

    ``0-0`` stands for a stream that had no entries yet; trimming since then is detectable from Redis 7 on
    (entries-added). A cursor just before the oldest entry is the end of a gap that was already reported.
    """
    ...


@script()
def mirror_offset(lease: str, stream: str, *, group: str, offset: str) -> ScriptCall:
    """Set the group's entry count up to ``offset`` and mirror both. Does nothing if the server does not count entries
    (Redis 6.2).
    """
    ...
