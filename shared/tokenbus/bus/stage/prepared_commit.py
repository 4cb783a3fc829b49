"""A batch on its way through a partition: a frame that failed, what the logic applied, the commit built of it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenbus.bus.scripts import Commit
from tokenbus.bus.server.stream_reader import Entry


class Poison(msgspec.Struct, frozen=True):
    """A frame that could not be applied."""

    run: str
    entry_id: str
    frame: bytes
    reason: str
    size: int | None = None
    """Size of the frame in bytes, if it could not be read."""


class AppliedEntries(msgspec.Struct, frozen=True):
    """A batch that the logic has applied; its outputs are still pending in the logic."""

    entries: Sequence[Entry]
    size: int
    """Total bytes of frames."""
    poison: list[Poison]
    ended: set[str]
    """Runs whose checkpoint must be deleted."""
    void: set[str]
    """Runs that ended because an entry could not be read."""


class PreparedCommit(msgspec.Struct, frozen=True):
    """The commit of a batch and its poison frames."""

    commit: Commit
    entries: Sequence[Entry]
    size: int
    """Total bytes of frames."""
    poison: list[Poison]

    @property
    def memory_bytes(self) -> int:
        """Approximate memory use in bytes."""
        return self.size + self.commit.held
