"""The last commits of a partition, in its owner's memory: what an asynchronous fail-over may have lost of them.

A replica that is promoted serves a past state of its master. So its offset is one at which some commit ended, and what
it lost of this partition is exactly the commits after that one.
"""

from __future__ import annotations

from collections import deque

from tokenbus.bus.server.stream_reader import id_key
from tokenbus.bus.stage.partition import PreparedCommit
from tokenbus.events.error_info import ErrorInfo

KEPT_S = 5.0
"""A replica whose link works is behind by a fraction of a second. One whose link broke may be promoted too, but it was
out of sight for as long already, and whoever can lose minutes is not helped by a few more seconds."""
MAX_BYTES = 2**19
"""What is held of a partition, about: so a worker that owns many stays within a few MB however busy they are."""
LOST_WRITES = ErrorInfo(
    code="server_lost_writes",
    kind="internal",
    message="the server failed over and forgot events of this run that were out already",
)


class CommitJournal:
    """What was committed from ``offset`` on, the last of it: a few seconds, or as much as ``MAX_BYTES`` allow."""

    def __init__(self, offset: str) -> None:
        self.offset = offset
        """The last that was committed."""
        self._begin = offset
        """Where the first commit that is kept began."""
        self._commits: deque[tuple[str, PreparedCommit, int, float]] = deque()
        """Of each its end, itself, its bytes and the time."""
        self._held = 0

    def keep(self, offset: str, work: PreparedCommit, now: float) -> None:
        """This work led to the offset: the server had all up to there at ``now``, in seconds of any steady clock.

        Only here does time pass for older commits. So however long the server is away, what it knew last is kept.
        """
        self.offset = offset
        size = work.memory_bytes
        self._commits.append((offset, work, size, now))
        self._held += size
        while self._commits and (self._held > MAX_BYTES or self._commits[0][3] < now - KEPT_S):
            self._begin, _, size, _ = self._commits.popleft()
            self._held -= size

    def is_ahead_of(self, offset: str) -> bool:
        """Whether the server, which stands at ``offset``, has forgotten a commit."""
        return id_key(offset) < id_key(self.offset)

    def after(self, offset: str) -> list[PreparedCommit]:
        """What was committed after the offset; nothing where not all of that is here, for a log shall have no gap."""
        if id_key(offset) < id_key(self._begin):
            return []
        return [work for end, work, _, _ in self._commits if id_key(end) > id_key(offset)]
