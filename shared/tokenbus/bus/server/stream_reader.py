"""Plain blocking reads of several streams at once, the same for a single server and a Cluster.

A single server answers one XREAD for all streams; in a Cluster each slot needs its own, so those run side by
side and the first to answer is handed out while the others go on waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import msgspec
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as NoReply

from tokenbus.bus.server.retry import FIRST_PAUSE_S, LONGEST_PAUSE_S
from tokenbus.bus.server.server import Server, is_alien, is_final, may_pass

Fields: TypeAlias = dict[bytes, bytes]
Entry: TypeAlias = tuple[bytes, Fields]
Found: TypeAlias = list[tuple[str, list[Entry]]]

MAX_BLOCK_MS = 2000
"""redis-py gives a socket 5 s to answer; a read must come back well before."""
BROKEN_READS = 3
"""A read that failed so often in a row may fail because of an entry."""


class Unreadable(msgspec.Struct, frozen=True):
    """An entry of a stage's input that cannot be read whole."""

    entry: Entry
    """Its id, and those of its fields that can be read by themselves."""
    sizes: dict[bytes, int]
    """Of each other field: how many bytes it has."""
    reason: str


def id_key(entry_id: str) -> tuple[int, int]:
    """A stream entry id as something that sorts."""
    ms, _, seq = entry_id.partition("-")
    return int(ms), int(seq or 0)


class StreamReader:
    """Reads new entries of a changing set of streams, each after its own offset; bounded by ``count`` a stream.

    One caller at a time. A `wake` from elsewhere ends a waiting `read` early, empty-handed.
    """

    def __init__(self, server: Server, *, count: int) -> None:
        self._server = server
        self.count = count
        """Most entries of a stream that one read gives; may be changed between two."""
        self._scope: asyncio.Timeout | None = None
        """Around the read that waits."""
        self._woken = False
        self._apart: dict[tuple[str, ...], tuple[dict[str, str], asyncio.Task[Any]]] = {}
        """Cluster: by slot, the offsets asked for and the read that waits for what follows them."""
        self._pauses: dict[tuple[str, ...], float] = {}
        """Cluster: by slot whose last read failed, the seconds before the next."""
        self._broken: dict[str, int] = {}
        """By stream: how often in a row its reading failed, and not because of the server's state."""

    def pop_unreadable(self) -> list[str]:
        """Streams whose reading failed `BROKEN_READS` times in a row. Each failure counts for one call of this."""
        broken = [stream for stream, times in self._broken.items() if times >= BROKEN_READS]
        for stream in broken:
            del self._broken[stream]
        return broken

    def _count(self, streams: Iterable[str], error: BaseException | None) -> None:
        """A read of these ended so."""
        of_itself = isinstance(error, RedisError | OSError) and not may_pass(error) and not is_final(error)
        if of_itself or is_alien(error):
            for stream in streams:  # a wait for a reply takes seconds
                self._broken[stream] = self._broken.get(stream, 0) + (BROKEN_READS if isinstance(error, NoReply) else 1)
        elif self._broken:
            for stream in streams:
                self._broken.pop(stream, None)

    def wake(self) -> None:
        """End the read that waits now, or else the next one, at once."""
        if self._scope and not self._woken:
            # A plain read may be cut off: the server keeps no state of it, and redis-py drops the connection.
            self._scope.reschedule(0)
        self._woken = True

    async def read(self, offsets: Mapping[str, str], *, block_ms: int = MAX_BLOCK_MS) -> Found:
        """Entries after each stream's offset; waits up to ``block_ms`` for some, with 0 not at all.

        Raises what redis-py raises, in a Cluster only where nothing can be read: streams whose node is away are read
        again by and by.
        """
        if self._woken:
            self._woken = False
            return []
        block_ms = min(block_ms, MAX_BLOCK_MS)
        try:
            async with asyncio.timeout(None) as self._scope:  # in the hot path, and cheaper than a task to cancel
                if not offsets:
                    await asyncio.sleep(block_ms / 1000)
                    return []
                if self._server.topology == "cluster":
                    return await self._read_separately(offsets, block_ms)
                found = await self._server.client.xread(offsets, count=self.count, block=block_ms or None)
                self._count(offsets, None)
                return _named(found)
        except TimeoutError:
            if not self._woken:
                raise
            return []
        except (RedisError, OSError) as e:
            if self._server.topology != "cluster":
                self._count(offsets, e)
            raise
        finally:
            self._scope, self._woken = None, False

    async def close(self) -> None:
        """Give up the reads that wait, and their connections."""
        self.wake()
        await self._cancel(list(self._apart))

    async def _read_separately(self, offsets: Mapping[str, str], block_ms: int) -> Found:
        """Keep one read waiting for each slot; hand out those that came back."""
        groups = {tuple(group): {k: offsets[k] for k in group} for group in self._server.read_groups(list(offsets))}
        await self._cancel([g for g, (asked, _) in self._apart.items() if groups.get(g) != asked])
        for group, asked in groups.items():
            if group not in self._apart:
                read = self._read_slot(asked, block_ms or MAX_BLOCK_MS, self._pauses.get(group, 0))
                self._apart[group] = asked, asyncio.ensure_future(read)
        tasks = [task for _, task in self._apart.values()]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=block_ms / 1000)
        found: Found = []
        failed: BaseException | None = None
        for group, (_, task) in list(self._apart.items()):
            if not task.done():
                continue
            del self._apart[group]
            self._count(group, task.exception())
            if error := task.exception():
                failed = error
                pause = self._pauses.get(group, FIRST_PAUSE_S / 2)
                self._pauses[group] = min(2 * pause, LONGEST_PAUSE_S)
            else:
                self._pauses.pop(group, None)
                found += _named(task.result())
        if failed and groups.keys() <= self._pauses.keys():
            self._pauses.clear()  # from here on it is the caller who pauses
            raise failed
        return found

    async def _read_slot(self, asked: dict[str, str], block_ms: int, pause: float) -> Any:
        if pause:
            await asyncio.sleep(pause)
        return await self._server.client.xread(asked, count=self.count, block=block_ms)

    async def _cancel(self, groups: list[tuple[str, ...]]) -> None:
        tasks = [self._apart.pop(g)[1] for g in groups]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)


def _named(reply: Iterable[tuple[bytes, list[Entry]]]) -> Found:
    return [(name.decode(), entries) for name, entries in reply]
