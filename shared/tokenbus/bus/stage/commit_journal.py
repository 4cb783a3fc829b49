"""The last commits of a partition, kept in its owner's memory to repair an asynchronous fail-over.

A promoted replica serves a past state of its master. Its offset is therefore the end of some commit, and the commits
after that offset are exactly what this partition lost.
"""

from __future__ import annotations

from collections import deque

from tokenbus.bus.server.stream_reader import id_key
from tokenbus.bus.stage.prepared_commit import PreparedCommit
from tokenbus.events.error_info import ErrorInfo

KEPT_S = 5.0
"""How long a commit is kept. A replica with a working link lags by a fraction of a second. A replica whose link broke
may be promoted too, but its lag can be minutes, and a few more seconds here would not cover that.
"""
MAX_BYTES = 2**19
"""Approximate memory limit per partition, so that a worker with many busy partitions stays within a few MB."""
LOST_WRITES = ErrorInfo(
    code="server_lost_writes",
    kind="internal",
    message="the server failed over and forgot events of this run that were out already",
)


class CommitJournal:
    """The most recent commits, starting at ``offset``: those of the last few seconds, up to ``MAX_BYTES``."""

    def __init__(self, offset: str) -> None:
        self.offset = offset
        """End of the last commit."""
        self._begin = offset
        """Start of the oldest commit that is kept."""
        self._commits: deque[tuple[str, PreparedCommit, int, float]] = deque()
        """For each commit: its end, the commit, its size in bytes, and its time."""
        self._held = 0

    def keep(self, offset: str, work: PreparedCommit, now: float) -> None:
        """Add a commit that ended at ``offset``. The server had it at ``now`` (seconds of a monotonic clock).

        Older commits expire only in this call, so an outage of any length drops nothing.
        """
        self.offset = offset
        size = work.memory_bytes
        self._commits.append((offset, work, size, now))
        self._held += size
        while self._commits and (self._held > MAX_BYTES or self._commits[0][3] < now - KEPT_S):
            self._begin, _, size, _ = self._commits.popleft()
            self._held -= size

    def is_ahead_of(self, offset: str) -> bool:
        """Whether the server, now at ``offset``, lost a commit."""
        return id_key(offset) < id_key(self.offset)

    def after(self, offset: str) -> list[PreparedCommit]:
        """The commits after ``offset``; empty if some of them are no longer kept, because a log must have no gap."""
        if id_key(offset) < id_key(self._begin):
            return []
        return [work for end, work, _, _ in self._commits if id_key(end) > id_key(offset)]
