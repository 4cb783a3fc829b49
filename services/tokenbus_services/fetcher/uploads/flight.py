"""An upload in progress, and how its waiting turns know that it progresses.

Turns that need the same file share one upload, which runs in its own task. While the upload progresses, so do they. If
it makes no progress for longer than its step may take, their work counts as stuck, so a stalled upload delays none of
them forever.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

import msgspec

from tokenbus.bus.liveness import IDLE_S, beat
from tokenbus.providers.file_api import ProviderFile
from tokenbus_services.media.blob_cache import Found

PIECE_S = 60.0
"""How long the next piece of a blob may take: from its store, or to the provider."""


class Flight:
    """An upload that turns wait for; cancelled when the last of them is."""

    def __init__(self) -> None:
        self.waiting = 0
        self.task: asyncio.Task[ProviderFile] | None = None
        self._quiet_until = 0.0
        """Until then it may be silent, in the event loop's time."""

    def start(self, work: Coroutine[Any, Any, ProviderFile]) -> None:
        """Start the upload."""
        self.moves(PIECE_S)
        self.task = asyncio.create_task(work, name="upload")

    def moves(self, quiet_s: float) -> None:
        """Record progress. The next step may take this long."""
        self._quiet_until = max(self._quiet_until, asyncio.get_running_loop().time() + quiet_s)

    async def landed(self) -> ProviderFile:
        """Wait for its end, with a beat as long as it progresses. Raises what the upload raised."""
        assert self.task
        loop = asyncio.get_running_loop()
        while not (await asyncio.wait({self.task}, timeout=IDLE_S))[0]:
            if loop.time() < self._quiet_until:
                beat()
        return self.task.result()

    def watched(self, found: Found) -> Found:
        """The same blob; each piece that is read of it is progress."""
        return msgspec.structs.replace(found, pieces=_counted(found.pieces, lambda: self.moves(PIECE_S)))


def _counted(
    pieces: Callable[[], AsyncGenerator[bytes]], moved: Callable[[], None]
) -> Callable[[], AsyncGenerator[bytes]]:
    async def counted() -> AsyncGenerator[bytes]:
        async with aclosing(pieces()) as read:
            async for piece in read:
                moved()
                yield piece

    return counted
