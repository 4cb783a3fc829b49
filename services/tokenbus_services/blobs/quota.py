"""How many bytes all blobs may take: pure."""

from __future__ import annotations

from tokenbus.errors import BlobQuotaExceeded


class Quota:
    """Kept within a process to the byte; several processes together may be over it by what they stored since their last
    counts."""

    def __init__(self, most: int | None) -> None:
        """None: no bound."""
        self._most = most
        self._held: int | None = None
        """As the last count found it and this process changed it; None before the first."""
        self._changes = 0

    @property
    def is_set(self) -> bool:
        """Whether there is a bound."""
        return self._most is not None

    @property
    def wants_count(self) -> bool:
        """Whether nothing can be reserved before what is stored was counted."""
        return self.is_set and self._held is None

    def reserve(self, size: int) -> None:
        """So many bytes are about to be stored. Raises BlobQuotaExceeded."""
        held = self._held or 0
        if self._most is not None and held + size > self._most:
            raise BlobQuotaExceeded("quota", f"{held} of {self._most} bytes are taken, {size} more were asked")
        self._changes += 1
        self._add(size)

    def give_back(self, size: int) -> None:
        """So many bytes are stored no more, or were not after all."""
        self._add(-size)

    def begin_count(self) -> int:
        """A count of what is stored begins; to be handed to `counted`."""
        return self._changes

    def counted(self, begun: int, held: int) -> None:
        """The count came to this, without what was given back meanwhile. Void where something was stored meanwhile,
        which it may or may not have seen."""
        if self._changes == begun:
            self._held = held

    def _add(self, size: int) -> None:
        if self._held is not None:
            self._held += size
