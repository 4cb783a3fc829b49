"""Plain blocking reads of several streams at once, the same for a single server and a Cluster.

A single server answers one XREAD for all streams; in a Cluster each stream needs its own, so those run side by
side and the first to answer is handed out while the others go on waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, TypeAlias

from tokenbus.bus.server import Server

Fields: TypeAlias = dict[bytes, bytes]
Entry: TypeAlias = tuple[bytes, Fields]
Found: TypeAlias = list[tuple[str, list[Entry]]]

MAX_BLOCK_MS = 2000
"""redis-py gives a socket 5 s to answer; a read must come back well before."""


def id_key(entry_id: str) -> tuple[int, int]:
    """A stream entry id as something that sorts."""
    ms, _, seq = entry_id.partition("-")
    return int(ms), int(seq or 0)


class Reader:
    """Reads new entries of a changing set of streams, each after its own offset; bounded by ``count`` a stream.

    One caller at a time. A `wake` from elsewhere ends a waiting `read` early, empty-handed.
    """

    def __init__(self, server: Server, *, count: int) -> None:
        self._server = server
        self._count = count
        self._waiting: dict[tuple[str, ...], tuple[dict[str, str], asyncio.Task[Any]]] = {}
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """End the read that waits now, or else the next one, at once."""
        self._woken.set()

    async def read(self, offsets: Mapping[str, str], *, block_ms: int = MAX_BLOCK_MS) -> Found:
        """Entries after each stream's offset; waits up to ``block_ms`` for some. Raises what redis-py raises."""
        await self._prepare(offsets, block_ms)
        woken = asyncio.ensure_future(self._woken.wait())
        tasks = {task for _, task in self._waiting.values()}
        try:
            await asyncio.wait({*tasks, woken}, return_when=asyncio.FIRST_COMPLETED, timeout=block_ms / 1000)
        finally:
            woken.cancel()
        self._woken.clear()
        found: Found = []
        for group, (_, task) in list(self._waiting.items()):
            if not task.done():
                continue
            del self._waiting[group]
            for name, entries in task.result() or ():
                found.append((name.decode(), entries))
        return found

    async def close(self) -> None:
        """Give up the reads that wait, and their connections."""
        await self._cancel(list(self._waiting))

    async def _prepare(self, offsets: Mapping[str, str], block_ms: int) -> None:
        """Start a read for each group of streams that has none; drop those that ask for something else by now."""
        groups = {tuple(group): {k: offsets[k] for k in group} for group in self._server.read_groups(list(offsets))}
        await self._cancel([g for g, (asked, _) in self._waiting.items() if groups.get(g) != asked])
        for group, asked in groups.items():
            if group and group not in self._waiting:
                read = self._server.client.xread(asked, count=self._count, block=max(1, min(block_ms, MAX_BLOCK_MS)))
                self._waiting[group] = (asked, asyncio.ensure_future(read))

    async def _cancel(self, groups: list[tuple[str, ...]]) -> None:
        # Safe for a plain read: the server keeps no state of it, and redis-py drops the connection.
        tasks = [self._waiting.pop(g)[1] for g in groups]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)
