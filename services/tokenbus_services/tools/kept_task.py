"""A call that goes on at its server when its worker ends: where the next worker finds it."""

from __future__ import annotations

from typing import Protocol


class KeptTask(Protocol):
    """The task of one call. All methods wait until the bus's server is available."""

    async def find(self) -> str:
        """The task that the call has begun, in any worker; empty: none."""
        ...

    async def keep(self, task: str) -> bool:
        """Keep the task for the next worker. False: the call is over, and nobody wants its result."""
        ...

    async def is_wanted(self) -> bool:
        """Whether the call is still open: False once its run was cancelled or has ended."""
        ...
