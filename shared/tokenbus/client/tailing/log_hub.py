"""Shares a client's few connections among the readers of many streams.

A `Hub` has one `Tail` per thousand streams; in a Cluster one or more per slot, because one read cannot name keys of two
slots.
"""

from __future__ import annotations

import asyncio

from tokenbus.bus.liveness import Liveness
from tokenbus.bus.server.server import Server
from tokenbus.client.tailing.stream_tail import StreamFeed, Tail

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
        tail.feeds.add(feed)
        return feed

    def close_feed(self, feed: StreamFeed) -> None:
        """Close a feed. A tail without feeds is closed after a while, if it is its slot's only one; else at once."""
        tail = feed.tail
        tail.feeds.discard(feed)
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
