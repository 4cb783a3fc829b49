"""Which streams a worker reads first: it leaves items that another worker takes at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

LOOK_S = 0.1
"""Poll interval of a worker that takes only what no other worker wants."""
ADOPTED_S = 5.0
"""How long a worker reads a stream that it does not prefer and that no other worker reads."""

ReadStreams = Callable[[list[str], int | None], Awaitable[dict[str, float]]]
"""Read new items of streams, waiting up to this many ms for them; returns by stream how many ms the oldest had waited.
"""


class PreferredStreams:
    """The preference of one worker."""

    def __init__(self, *, idle_only: Callable[[], bool], prefers: Callable[[str], bool] | None) -> None:
        """See `WorkQueue`."""
        self._idle_only = idle_only
        self._prefers = prefers
        self._adopted: dict[str, float] = {}
        """Stream that is not preferred, but whose items no other worker took at once -> until when it is read with the
        preferred ones.
        """
        self._look_at_others = 0.0

    async def read(
        self, streams: list[str], read: ReadStreams, block_ms: int, *, closing: Callable[[], bool]
    ) -> dict[str, float]:
        """Read the streams, each as far as this worker prefers it. Returns as `ReadStreams` does."""
        idle_only = self._idle_only()
        if self._prefers and not idle_only:
            now = asyncio.get_running_loop().time()
            ours = [s for s in streams if self._prefers(s) or self._adopted.get(s, 0.0) > now]
            if len(ours) < len(streams):
                return await self._read_ours_first(ours, [s for s in streams if s not in ours], read, closing)
        waited = await read(streams, None if idle_only else block_ms)
        if idle_only and not waited:
            await asyncio.sleep(LOOK_S)
        return waited

    async def _read_ours_first(
        self, ours: list[str], others: list[str], read: ReadStreams, closing: Callable[[], bool]
    ) -> dict[str, float]:
        """Read `ours`; from `others` take only items that no other worker takes at once."""
        clock = asyncio.get_running_loop().time
        waited: dict[str, float] = {}
        if ours:
            waited = await read(ours, round(LOOK_S * 1000))
        else:
            await asyncio.sleep(LOOK_S)
        if clock() >= self._look_at_others and not closing():
            self._look_at_others = clock() + LOOK_S
            left = await read(others, None)
            # No worker waits for these at all: from here on this one does, too.
            self._adopted |= {s: clock() + ADOPTED_S for s, ms in left.items() if ms >= LOOK_S * 500}
            waited |= left
        return waited
