"""Quota of all blobs, in bytes. Pure."""

from __future__ import annotations

from tokenbus.errors import BlobQuotaExceeded


class Quota:
    """A byte quota. Exact within one process; several processes may together exceed it by what they stored since their
    last counts.
    """

    def __init__(self, most: int | None) -> None:
        """``most``: the quota; None for none."""
        self._limit = most
        self._used: int | None = None
        """Stored bytes: the last count plus this process's changes; None before the first count."""
        self._changes = 0

    @property
    def is_set(self) -> bool:
        """Whether there is a quota."""
        return self._limit is not None

    @property
    def wants_count(self) -> bool:
        """Whether the stored bytes must be counted before anything can be reserved."""
        return self.is_set and self._used is None

    def reserve(self, size: int) -> None:
        """Reserve bytes that are about to be stored. Raises BlobQuotaExceeded."""
        held = self._used or 0
        if self._limit is not None and held + size > self._limit:
            raise BlobQuotaExceeded("quota", f"{held} of {self._limit} bytes are used, {size} more were requested")
        self._changes += 1
        self._add(size)

    def release(self, size: int) -> None:
        """Release bytes that were removed, or not stored after all."""
        self._add(-size)

    def begin_count(self) -> int:
        """Start a count; pass the returned value to `counted`."""
        return self._changes

    def finish_count(self, begun: int, held: int) -> None:
        """Finish a count, which excludes bytes released meanwhile. Ignored if anything was stored meanwhile, because
        the count may or may not include it.
        """
        if self._changes == begun:
            self._used = held

    def _add(self, size: int) -> None:
        if self._used is not None:
            self._used += size
