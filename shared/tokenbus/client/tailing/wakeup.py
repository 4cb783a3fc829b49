"""A flag that one task waits for: `asyncio.Event` without its queue of waiters, which takes 760 bytes each.

A service holds thousands of readers, each of which waits for its next events most of the time.
"""

from __future__ import annotations

import asyncio


class Wakeup:
    """Begins unset. Only one task may wait at a time."""

    __slots__ = ("_is_set", "_waiter")

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Wake the task that waits; the next `wait` returns at once."""
        self._is_set = True
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)

    def clear(self) -> None:
        """Unset it."""
        self._is_set = False

    async def wait(self) -> None:
        """Return once it is set."""
        if self._is_set:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
