"""The work queue: competing consumers on long, independent items, at least once.

A worker reads with its own consumer name, keeps what it holds alive by claiming it again every ``beat_s``, and
takes over what nobody kept alive for ``idle_s``. An item that came by such a claim is marked: its first worker may
be a zombie that still runs, so whatever the item does must be fenced (guarantee 4 of design.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from redis.exceptions import RedisError, ResponseError

from tokenbus.bus import scripts
from tokenbus.bus.outage import outlast
from tokenbus.bus.reader import Entry, Fields
from tokenbus.bus.send import send
from tokenbus.bus.server import Server

BLOCK_MS = 500
"""How long a read waits. It is never cancelled, for the server may have given it an item by then; so a
shutdown waits this long at the most."""


class Item(msgspec.Struct, frozen=True, eq=False):
    """One entry in this worker's hands."""

    stream: str
    entry_id: str
    fields: Fields
    deliveries: int
    """How often it was handed out, this time included; above 1 its earlier worker was lost."""


class Queue:
    """One worker's part of a group's work queues. Call `open`, `read` in a loop, `finish` each item, `close`."""

    def __init__(
        self,
        server: Server,
        *,
        group: str,
        streams: Sequence[str],
        worker: str,
        lost: Callable[[Item], None],
        count: int = 1,
        idle_s: float = 4.0,
        beat_s: float = 1.0,
    ) -> None:
        """``lost`` is called with an item that another worker took: work on it must stop. ``count``: a read's most
        items of each stream."""
        self._server = server
        self._group = group
        self._streams = list(streams)
        self._worker = worker
        self._lost = lost
        self._count = count
        self._idle_ms = int(idle_s * 1000)
        self._beat_s = beat_s
        self._held: dict[tuple[str, str], Item] = {}
        self._ready: asyncio.Queue[Item] = asyncio.Queue()
        self._readers: list[asyncio.Task[None]] = []
        self._room = asyncio.Event()
        self._closing = False
        self._healthy = False

    @property
    def healthy(self) -> bool:
        """Whether the last command reached the server."""
        return self._healthy

    @property
    def held(self) -> int:
        """How many items are in this worker's hands."""
        return len(self._held)

    async def open(self) -> None:
        """Make the groups where they are missing, and begin. Raises what redis-py raises."""
        await self._declare()
        self._healthy = True
        groups = self._server.read_groups(self._streams)
        self._readers = [asyncio.create_task(self._read_loop(g), name=f"queue {self._group}") for g in groups]
        self._readers.append(asyncio.create_task(self._beat_loop(), name=f"beat {self._group}"))

    async def read(self) -> Item:
        """The next item. While nobody waits here no more than one read's worth is taken from the server."""
        self._room.set()
        try:
            return await self._ready.get()
        finally:
            self._room.clear()

    async def read_ready(self) -> list[Item]:
        """The next item, and all others that are here already."""
        items = [await self.read()]
        while not self._ready.empty():
            items.append(self._ready.get_nowait())
        return items

    async def finish(self, items: Sequence[Item]) -> None:
        """The items are done: acknowledge and delete them. Tries until the server has it."""
        for item in items:
            self._held.pop((item.stream, item.entry_id), None)
        by_stream: dict[str, list[str]] = {}
        for item in items:
            by_stream.setdefault(item.stream, []).append(item.entry_id)
        for stream, ids in by_stream.items():
            call = scripts.finish(stream, group=self._group, ids=ids)
            await outlast(lambda call=call: send(self._server, call), what=f"finish of {self._group}")

    async def hand_back(self, items: Sequence[Item]) -> None:
        """Put items that were not begun back for another worker, at once."""
        for item in items:
            fields: list[scripts.Arg] = [part for pair in item.fields.items() for part in pair]
            call = scripts.hand_back(
                item.stream, group=self._group, consumer=self._worker, entry_id=item.entry_id, fields=fields
            )
            self._held.pop((item.stream, item.entry_id), None)
            await send(self._server, call)

    async def stop_reading(self) -> None:
        """Take nothing more; what was taken and not yet given out by `read` goes back. Held items stay alive."""
        self._closing = True
        self._room.set()
        readers, self._readers = self._readers[:-1], self._readers[-1:]
        await asyncio.gather(*readers, return_exceptions=True)
        waiting: list[Item] = []
        while not self._ready.empty():
            waiting.append(self._ready.get_nowait())
        try:
            await self.hand_back(waiting)
        except (RedisError, OSError):
            pass  # they become idle, and another worker claims them

    async def close(self) -> None:
        """Stop all; items still held are left to be claimed by others. The consumer goes when it holds nothing."""
        if not self._closing:
            await self.stop_reading()
        for task in self._readers:
            task.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        if self._held:
            return
        try:
            for stream in self._streams:
                await self._server.client.xgroup_delconsumer(stream, self._group, self._worker)
        except (RedisError, OSError):
            pass  # a later worker sweeps it away

    # --- reading ----------------------------------------------------------------------------------------------

    async def _read_loop(self, streams: list[str]) -> None:
        while not self._closing:
            await self._room.wait()
            if self._closing:
                return
            try:
                found: Any = await self._server.client.xreadgroup(
                    self._group, self._worker, dict.fromkeys(streams, ">"), count=self._count, block=BLOCK_MS
                )
                self._healthy = True
            except (RedisError, OSError) as e:
                await self._recover(e)
                continue
            for name, entries in found or ():
                for entry in entries:
                    self._take(name.decode(), entry, 1)
            if found:
                self._room.clear()  # enough for now; `read` asks again

    def _take(self, stream: str, entry: Entry, deliveries: int) -> None:
        item = Item(stream, entry[0].decode(), entry[1], deliveries)
        self._held[(item.stream, item.entry_id)] = item
        self._ready.put_nowait(item)

    # --- keeping alive and taking over --------------------------------------------------------------------------

    async def _beat_loop(self) -> None:
        sweep = 0
        while True:
            await asyncio.sleep(self._beat_s)
            try:
                await self._beat()
                if not self._closing:
                    await self._claim()
                    sweep = (sweep + 1) % 60
                    if sweep == 1:
                        await self._sweep()
                self._healthy = True
            except (RedisError, OSError) as e:
                await self._recover(e)

    async def _beat(self) -> None:
        by_stream: dict[str, list[str]] = {}
        for stream, entry_id in self._held:
            by_stream.setdefault(stream, []).append(entry_id)
        for stream, ids in by_stream.items():
            call = scripts.heartbeat(stream, group=self._group, consumer=self._worker, ids=ids)
            for entry_id in await send(self._server, call):
                if item := self._held.pop((stream, entry_id.decode()), None):
                    self._lost(item)

    async def _claim(self) -> None:
        for stream in self._streams:
            reply: Any = await self._server.client.xautoclaim(
                stream, self._group, self._worker, self._idle_ms, start_id="0-0", count=16
            )
            for entry in reply[1]:
                if not entry or entry[1] is None or (stream, entry[0].decode()) in self._held:
                    continue  # deleted meanwhile (Redis 6.2 gives nil), or our own after a long pause
                pending = await self._server.client.xpending_range(stream, self._group, entry[0], entry[0], 1)
                self._take(stream, entry, max(2, pending[0]["times_delivered"] if pending else 2))

    async def _sweep(self) -> None:
        """Remove consumers that died long ago and hold nothing, so that their number stays bounded."""
        for stream in self._streams:
            consumers: Any = await self._server.client.xinfo_consumers(stream, self._group)
            for c in consumers:
                if not c["pending"] and c["idle"] > 600_000 and c["name"].decode() != self._worker:
                    await self._server.client.xgroup_delconsumer(stream, self._group, c["name"])

    # --- the server away ----------------------------------------------------------------------------------------

    async def _declare(self) -> None:
        for stream in self._streams:
            try:
                await self._server.client.xgroup_create(stream, self._group, id="0-0", mkstream=True)
            except ResponseError as e:
                if "BUSYGROUP" not in str(e):
                    raise

    async def _recover(self, error: Exception) -> None:
        self._healthy = False
        if "NOGROUP" in str(error):  # the stream was deleted, or the server came back empty
            await outlast(self._declare, what=f"groups of {self._group}")
            return
        await asyncio.sleep(0.1)
