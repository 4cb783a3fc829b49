"""Waits for new entries of many streams on one connection, for many readers at once.

One XREAD waits for all streams of a `Tail`. To add a stream, the waiting read is ended with CLIENT UNBLOCK, or by
dropping its connection if the server does not allow that. A reader has a `StreamFeed`. Once a feed holds `ROOM`
entries, its stream is left out of the reads: a slow reader costs that much memory and delays no other reader.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from redis.exceptions import NoPermissionError, RedisError

from tokenbus.bus.liveness import Liveness, wait_briefly
from tokenbus.bus.server.clients import FastRedis
from tokenbus.bus.server.server import Server, translated
from tokenbus.bus.server.stream_reader import MAX_BLOCK_MS, Entry, id_key
from tokenbus.errors import ServerUnavailable

ROOM = 256
"""Entries a feed holds before its stream is left out of the reads; also the maximum per stream and read."""
GATHER_S = 0.002
"""Readers that arrive within this time interrupt the waiting read only once."""
TRIES = 3
MOST_DEFECTS = 3
"""A tail ends after this many failed reads in a row, if neither the server nor a single stream explains it."""
ASKED_AT_ONCE = 100
"""Maximum streams to try individually in one round trip."""
READERS_STEPS = 3
"""Steps of the event loop that the consumer of a reader needs to forward its events. The next read begins after
that."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0

log = logging.getLogger(__name__)


class StreamFeed:
    """One reader's view of a stream: the entries after a position."""

    def __init__(self, tail: Tail, stream: str, position: str) -> None:
        self.stream = stream
        self.position = position
        self.entries: list[Entry] = []
        self.error: BaseException | None = None
        self.unreadable: BaseException | None = None
        """Why the server cannot read this very stream, for example because its key is of another type."""
        self.tail = tail
        self.news = Wakeup()

    async def take(self, wait_s: float) -> list[Entry]:
        """Return the new entries in order; empty if none came within ``wait_s``.

        Raises ServerUnavailable, once per failed read; RuntimeError if the client is closed; and redis-py's error if
        the server cannot read this stream.
        """
        if self.unreadable and not self.entries:
            raise self.unreadable
        if not self.entries:
            self.error = None  # left by a read that this reader did not wait for
            self.news.clear()
            try:
                async with asyncio.timeout(wait_s):
                    self.tail.include(self)
                    await self.news.wait()
            except TimeoutError:
                return []
        if not self.entries and self.error:
            raise self.error
        taken, self.entries = self.entries, []
        return taken

    def put(self, entries: list[Entry]) -> None:
        """Add new entries; skip those at or before the position."""
        after = id_key(self.position)
        new = [entry for entry in entries if id_key(entry[0].decode()) > after]
        if new:
            self.entries += new
            self.position = new[-1][0].decode()
            self.news.set()


class Tail:
    """One connection that waits for new entries on the streams of its feeds."""

    def __init__(self, server: Server, liveness: Liveness, slot: str) -> None:
        self.feeds: dict[StreamFeed, None] = {}
        """In the order in which they joined: the simulation repeats a play to the last byte."""
        self.slot = slot
        self.closing: asyncio.TimerHandle | None = None
        """Ends the tail, which has no feed."""
        self._server = server
        client: Any = server.client
        self._own: FastRedis | None = client.separate_client() if isinstance(client, FastRedis) else None
        self._reading: dict[StreamFeed, None] = {}
        self._scope: asyncio.Timeout | None = None
        """Scope of the read that is waiting."""
        self._ending: asyncio.Timeout | None = None
        """Scope of the read that is being interrupted."""
        self._enders: set[asyncio.Task[None]] = set()
        self._id: int | None = None
        """The server's id for the connection."""
        self.ended: BaseException | None = None
        self._filled = asyncio.Event()
        self._task = liveness.start(self._run(), name="tail of logs")
        self._task.add_done_callback(self._stopped)

    def include(self, feed: StreamFeed) -> None:
        """Make sure the feed's stream is being read. Raises the error that ended the tail, if any."""
        if self.ended:
            raise self.ended
        self._filled.set()
        scope = self._scope
        if scope and feed not in self._reading:
            self._interrupt(scope)

    def rest(self) -> None:
        """End the waiting read, since no feed is left: the next feed's is then begun at once."""
        if not self.ended and self._scope:
            self._interrupt(self._scope)

    def _interrupt(self, scope: asyncio.Timeout) -> None:
        if scope is self._ending:
            return
        self._ending = scope
        ender = asyncio.create_task(self._end(scope), name="end of a read")
        self._enders.add(ender)
        ender.add_done_callback(self._enders.discard)

    async def aclose(self) -> None:
        """Stop reading and release the connection."""
        self.end(RuntimeError("the client is closed"))
        Liveness.expect_end(self._task)
        tasks = [self._task, *self._enders]
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:  # a second cancellation must not leak the connection
            if self._own:
                await self._own.release()

    async def _end(self, scope: asyncio.Timeout) -> None:
        """Interrupt the read in this scope, once for all readers that arrive meanwhile."""
        for _ in range(TRIES):  # the read may not have reached the server yet
            await asyncio.sleep(GATHER_S)
            if self._scope is not scope or await self._unblocked():
                return
        if self._scope is scope:
            scope.reschedule(0)  # the server keeps no state for a plain read, and redis-py drops the connection

    async def _unblocked(self) -> bool:
        client: Any = self._server.client
        try:
            return self._id is not None and bool(await client.client_unblock(self._id))
        except (RedisError, OSError):
            return False  # this user may not run it, or the server is unavailable

    async def _run(self) -> None:
        pause_s, defects = FIRST_PAUSE_S, 0
        while True:
            try:
                if defects and await self._found_unreadable():
                    defects = 0
                await self._read()
                pause_s, defects = FIRST_PAUSE_S, 0
            except ServerUnavailable as e:
                self._id = None
                self._fail(e)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            except Exception as e:
                self._id = None
                defects += 1
                if defects >= MOST_DEFECTS:
                    task = asyncio.current_task()
                    assert task
                    Liveness.expect_end(task)  # its readers know of it, and the next one begins another
                    self.end(e)
                    return
                log.warning("read of %d logs: %s: %s", len(self._reading), type(e).__name__, e)

    async def _found_unreadable(self) -> bool:
        """Try each stream individually after a read failed that was not the server's fault: a thousand readers must not
        end because of one of them. Returns whether some cannot be read; their readers get the error, and end.

        Raises ServerUnavailable.
        """
        offsets = list(_offsets(self._reading).items())
        errors: dict[str, BaseException] = {}
        for at in range(0, len(offsets), ASKED_AT_ONCE):
            some = offsets[at : at + ASKED_AT_ONCE]
            with translated(self._server):
                pipe = self._server.client.pipeline(transaction=False)
                for stream, position in some:
                    pipe.xread({stream: position}, count=1)
                replies: list[object] = await pipe.execute(raise_on_error=False)
            errors |= {s: e for (s, _), e in zip(some, replies, strict=True) if isinstance(e, BaseException)}
        found = [feed for feed in self._reading if feed.stream in errors]
        for feed in found:
            feed.unreadable = feed.error = errors[feed.stream]
            feed.news.set()
        return bool(found)

    def _stopped(self, task: asyncio.Task[None]) -> None:
        if self.ended is None:  # cancelled from outside: no task would read for these feeds
            self.end(RuntimeError("the task that reads for all followers of this client was cancelled"))

    def end(self, error: BaseException) -> None:
        """End all feeds with this error."""
        self.ended = error
        self._fail(error)

    async def _read(self) -> None:
        client: Any = self._own or self._server.client
        if self._own and self._id is None:
            with translated(self._server), suppress(NoPermissionError):
                self._id = await client.client_id()
        self._reading = {feed: None for feed in self.feeds if len(feed.entries) < ROOM and not feed.unreadable}
        offsets = _offsets(self._reading)
        if not offsets:
            self._filled.clear()
            while not await wait_briefly(self._filled):
                pass
            return
        try:
            async with asyncio.timeout(None) as self._scope:
                with translated(self._server):
                    found = await client.xread(offsets, count=ROOM, block=MAX_BLOCK_MS)
        except TimeoutError:
            self._id = None  # the connection was dropped
            return
        finally:
            self._scope = None
        streams = {name.decode(): entries for name, entries in found}
        # Only feeds that were part of this read. A feed that joined meanwhile, or was full, may have an older position
        # and would miss the entries in between; the next read starts there.
        for feed in self._reading:
            if feed.stream in streams:
                feed.put(streams[feed.stream])
        if streams:
            for _ in range(READERS_STEPS):
                await asyncio.sleep(0)

    def _fail(self, error: BaseException) -> None:
        for feed in self.feeds:
            feed.error = error
            feed.news.set()


def _offsets(feeds: Iterable[StreamFeed]) -> dict[str, str]:
    """Where to read each stream: at the position of its slowest feed."""
    offsets: dict[str, str] = {}
    for feed in feeds:
        other = offsets.get(feed.stream)
        if other is None or id_key(feed.position) < id_key(other):
            offsets[feed.stream] = feed.position
    return offsets


# A flag that one task waits for: `asyncio.Event` without its queue of waiters, which takes 760 bytes each.
#
# A service holds thousands of readers, each of which waits for its next events most of the time.


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


# A `Hub` has one `Tail` per thousand streams; in a Cluster one or more per slot, because one read cannot name keys of
# two slots.


STREAMS = 1000
"""Maximum streams per tail: the server checks each of them whenever a read starts."""
READS = 8
"""Maximum concurrent reads of stored entries, over all readers."""
IDLE_S = 5.0
"""How long a tail without feeds keeps its connection: programs that follow one run after the other need no new one."""


class Hub:
    """A client's tails, created on demand."""

    def __init__(self, server: Server) -> None:
        self.reads = asyncio.Semaphore(READS)
        """Hold this around each read of stored entries; it limits connections if there are many readers."""
        self.liveness = Liveness()
        """Watches the tails of a client that a worker rests on; see `watch_readers`."""
        self._server = server
        self._tails: dict[str, list[Tail]] = {}
        """Keyed by hash tag in a Cluster; otherwise all under one empty key."""
        self._ending: set[asyncio.Task[None]] = set()

    def open_feed(self, stream: str, position: str) -> StreamFeed:
        """Open a feed of the stream's entries after ``position``. Close it with `close_feed`."""
        slot = stream.partition("{")[2].partition("}")[0] if self._server.topology == "cluster" else ""
        tails = self._tails.setdefault(slot, [])
        tail = next((t for t in tails if len(t.feeds) < STREAMS and not t.ended), None)
        if tail is None:
            tail = Tail(self._server, self.liveness, slot)
            tails.append(tail)
        if tail.closing:
            tail.closing.cancel()
            tail.closing = None
        feed = StreamFeed(tail, stream, position)
        tail.feeds[feed] = None
        return feed

    def close_feed(self, feed: StreamFeed) -> None:
        """Close a feed. A tail without feeds is closed after a while, if it is its slot's only one; else at once."""
        tail = feed.tail
        tail.feeds.pop(feed, None)
        if tail.feeds or tail.closing:
            return
        tails = self._tails.get(tail.slot, [])
        if tail.ended or len(tails) > 1:
            self._close(tail)
            return
        tail.rest()
        tail.closing = asyncio.get_running_loop().call_later(IDLE_S, self._close_idle, tail)

    def _close_idle(self, tail: Tail) -> None:
        tail.closing = None
        if not tail.feeds:
            self._close(tail)

    def _close(self, tail: Tail) -> None:
        tails = self._tails.get(tail.slot, [])
        if tail not in tails:
            return  # the hub was closed
        tails.remove(tail)
        task = asyncio.create_task(tail.aclose(), name="end of a tail")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def aclose(self) -> None:
        """End all feeds; their readers get RuntimeError."""
        tails = [tail for some in self._tails.values() for tail in some]
        self._tails.clear()
        for tail in tails:
            if tail.closing:
                tail.closing.cancel()
            await tail.aclose()
        await asyncio.gather(*self._ending, return_exceptions=True)
