"""Listens to what all workers of a partition must hear at once: every worker reads `control` for itself, none competes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from redis.exceptions import RedisError

from tokenbus.bus.keys import Keys
from tokenbus.bus.outage import LONGEST_PAUSE_S
from tokenbus.bus.reader import Reader
from tokenbus.bus.server import Server
from tokenbus.events.frames import Control, control_decoder

COUNT = 500


class ControlListener:
    """Calls ``told`` with every control message that comes after `open`; misses none over a lost connection."""

    def __init__(self, server: Server, keys: Keys, told: Callable[[Control], None]) -> None:
        self._server = server
        self._streams = [keys.topic(p, "control") for p in range(keys.partitions)]
        self._told = told
        self._reader = Reader(server, count=COUNT)
        self._offsets: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Begin where the streams end now. Raises what redis-py raises."""
        for stream in self._streams:
            last = await self._server.client.xrevrange(stream, count=1)
            self._offsets[stream] = last[0][0].decode() if last else "0-0"
        self._task = asyncio.create_task(self._run(), name="control")

    async def close(self) -> None:
        """Stop to listen."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._reader.close()

    async def _run(self) -> None:
        while True:
            try:
                found = await self._reader.read(self._offsets)
            except (RedisError, OSError):
                await asyncio.sleep(LONGEST_PAUSE_S / 5)
                continue
            for stream, entries in found:
                for entry_id, fields in entries:
                    self._offsets[stream] = entry_id.decode()
                    for frame in fields.values():
                        self._told(control_decoder.decode(frame))
