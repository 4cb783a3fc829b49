"""Blocking reads of several streams at once, for a single server and for a Cluster.

A single server answers one XREAD for all streams. In a Cluster each slot needs its own read; these run in parallel, and
the first result is returned while the others keep waiting.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any, TypeAlias

import msgspec
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as NoReply

from tokenbus.bus.server.error_replies import is_alien, is_final, may_pass
from tokenbus.bus.server.retry import FIRST_PAUSE_S, LONGEST_PAUSE_S
from tokenbus.bus.server.server import Server

log = logging.getLogger(__name__)

Fields: TypeAlias = dict[bytes, bytes]
Entry: TypeAlias = tuple[bytes, Fields]
Found: TypeAlias = list[tuple[str, list[Entry]]]

FIRST_PAGE, LARGEST_PAGE = 16, 256
PAGE_BYTES = 1 << 18
"""How much one reader holds until its caller takes it. A process has many readers."""
MAX_BLOCK_MS = 2000
"""redis-py allows a socket 5 s for a reply; a read must return well before that."""
BROKEN_READS = 3
"""After this many failures in a row an entry may be the cause."""


class Unreadable(msgspec.Struct, frozen=True):
    """An entry of a stage's input that cannot be read completely."""

    entry: Entry
    """Its id and its readable fields."""
    sizes: dict[bytes, int]
    """Size in bytes of each unreadable field."""
    reason: str


class Pages:
    """How many stored entries to read at once: about as many as have `PAGE_BYTES`, as those before them tell."""

    def __init__(self) -> None:
        self.count = FIRST_PAGE

    def fit(self, entries: list[Entry]) -> list[Entry]:
        """Note what came, and return what of its beginning fits, at least one entry; the rest is to be read again."""
        sizes = [sum(map(len, fields.values())) for _, fields in entries]
        if size := sum(sizes):
            self.count = max(1, min(2 * self.count, LARGEST_PAGE, PAGE_BYTES * len(entries) // size))
        if size <= PAGE_BYTES:
            return entries
        return entries[: max(1, sum(so_far <= PAGE_BYTES for so_far in accumulate(sizes)))]


def id_key(entry_id: str) -> tuple[int, int]:
    """Sort key of a stream entry id."""
    ms, _, seq = entry_id.partition("-")
    return int(ms), int(seq or 0)


class StreamReader:
    """Reads new entries of a changing set of streams, each after its own offset; at most ``count`` per stream.

    One caller at a time. `wake` ends a waiting `read` early, without entries.
    """

    def __init__(self, server: Server, *, count: int) -> None:
        self._server = server
        self.count = count
        """Maximum entries per stream and read; may change between reads."""
        self._scope: asyncio.Timeout | None = None
        """Timeout scope of the waiting read."""
        self._woken = False
        self._apart: dict[tuple[str, ...], tuple[dict[str, str], asyncio.Task[Any]]] = {}
        """Cluster: by slot, the requested offsets and the read that is waiting for entries after them."""
        self._pauses: dict[tuple[str, ...], float] = {}
        """Cluster: by slot whose last read failed, the pause in seconds before the next."""
        self._broken: dict[str, int] = {}
        """By stream: failed reads in a row that the server's state does not explain."""

    def pop_unreadable(self) -> list[str]:
        """Return the streams with `BROKEN_READS` failures in a row, and reset their counts."""
        broken = [stream for stream, times in self._broken.items() if times >= BROKEN_READS]
        for stream in broken:
            del self._broken[stream]
        return broken

    def _count(self, streams: Iterable[str], error: BaseException | None) -> None:
        """Count the result of a read of these streams."""
        of_itself = isinstance(error, RedisError | OSError) and not may_pass(error) and not is_final(error)
        if of_itself or is_alien(error):
            for stream in streams:  # waiting for a reply takes seconds
                self._broken[stream] = self._broken.get(stream, 0) + (BROKEN_READS if isinstance(error, NoReply) else 1)
        elif self._broken:
            for stream in streams:
                self._broken.pop(stream, None)

    def wake(self) -> None:
        """End the waiting read at once, or else the next one."""
        if self._scope and not self._woken:
            # A plain read may be cut off: the server keeps no state for it, and redis-py drops the connection.
            self._scope.reschedule(0)
        self._woken = True

    async def read(self, offsets: Mapping[str, str], *, block_ms: int = MAX_BLOCK_MS) -> Found:
        """Return entries after each stream's offset; waits up to ``block_ms`` for some, 0: does not wait.

        Raises redis-py's errors; in a Cluster only if nothing can be read: streams on a node that is unavailable are
        retried with pauses.
        """
        if self._woken:
            self._woken = False
            return []
        block_ms = min(block_ms, MAX_BLOCK_MS)
        try:
            async with asyncio.timeout(None) as self._scope:  # cheaper on the hot path than a task to cancel
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
        """Abandon the waiting reads and their connections."""
        self.wake()
        await self._cancel(list(self._apart))

    async def _read_separately(self, offsets: Mapping[str, str], block_ms: int) -> Found:
        """Keep one read waiting for each slot; return the results that have arrived."""
        groups = {tuple(group): {k: offsets[k] for k in group} for group in self._server.read_groups(list(offsets))}
        await self._cancel([g for g, (streams, _) in self._apart.items() if groups.get(g) != streams])
        for group, streams in groups.items():
            if group not in self._apart:
                read = self._read_slot(streams, block_ms or MAX_BLOCK_MS, self._pauses.get(group, 0))
                self._apart[group] = streams, asyncio.ensure_future(read)
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
                if group not in self._pauses and not isinstance(error, RedisError | OSError):
                    log.error("read of %s failed, and is tried again", ", ".join(group), exc_info=error)
                failed = error
                pause = self._pauses.get(group, FIRST_PAUSE_S / 2)
                self._pauses[group] = min(2 * pause, LONGEST_PAUSE_S)
            else:
                self._pauses.pop(group, None)
                found += _named(task.result())
        if failed and groups.keys() <= self._pauses.keys():
            self._pauses.clear()  # the caller pauses from here on
            raise failed
        return found

    async def _read_slot(self, streams: dict[str, str], block_ms: int, pause: float) -> Any:
        if pause:
            await asyncio.sleep(pause)
        return await self._server.client.xread(streams, count=self.count, block=block_ms)

    async def _cancel(self, groups: list[tuple[str, ...]]) -> None:
        tasks = [self._apart.pop(g)[1] for g in groups]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)


def _named(reply: Iterable[tuple[bytes, list[Entry]]]) -> Found:
    return [(name.decode(), entries) for name, entries in reply]
