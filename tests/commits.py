"""Commits of tests: a call with default values, and a commit that keeps what a stage's logic writes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from tokenbus.bus.scripts import Arg, Commit, ScriptCall


def commit_call(commit: Commit, **changes: Any) -> ScriptCall:
    """The call that commits one entry after offset ``0-0``, with these fields changed."""
    fields: dict[str, Any] = {
        "token": "1",
        "ttl_ms": 1000,
        "begin": "0-0",
        "end": "0-0",
        "watermark": "0-0",
        "entries": 1,
        "size": 1,
        "mirror": "",
        "entries_read": True,
        "topic_entries": 1000,
    }
    return commit.call(**(fields | changes))


class RecordingCommit(Commit):
    """Keeps the events and frames that a stage's logic writes, in place of sending them."""

    def __init__(self) -> None:
        super().__init__("", "")
        self.published: list[tuple[str, bytes]] = []
        """(log, event)"""
        self.appended: defaultdict[str, list[tuple[str, bytes]]] = defaultdict(list)
        """By stream: (run, frame)"""

    def publish(self, log: str, entry_id: str, data: bytes, topics: Sequence[str]) -> None:
        self.published.append((log, data))

    def append(self, stream: str, fields: Sequence[Arg]) -> None:
        for run, frame in zip(fields[::2], fields[1::2], strict=True):
            assert isinstance(run, str)
            assert isinstance(frame, bytes)
            self.appended[stream].append((run, frame))
