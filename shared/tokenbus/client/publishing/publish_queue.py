"""A client's queue of entries for the inbound stream; batches many entries into few commands."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from tokenbus.bus.scripts import Arg
from tokenbus.bus.scripts.requests import publish
from tokenbus.bus.server.run_scripts import JOINED_BYTES, run_script
from tokenbus.bus.server.server import Server, translated
from tokenbus.errors import PublishQueueFull, ServerFull

COMMANDS = 4
"""Maximum concurrent commands, and so connections. More of them did not make a busy server faster."""
ENTRIES = 256
"""Maximum entries per command, and maximum requests prepared at once: preparing thousands in one pass of the event loop
would starve its connections.
"""


class _Entry(msgspec.Struct, eq=False):
    data: bytes
    tenant: str
    most: int
    taken: asyncio.Future[None]


class PublishQueue:
    """Appends entries in the order they are put. Call `close` at the end."""

    def __init__(self, server: Server, *, most_queued: int) -> None:
        """``most_queued``: entries in flight before a caller with ``wait=False`` is refused."""
        self._server = server
        self._most_queued = most_queued
        self._in_flight = 0
        self._room = asyncio.Semaphore(ENTRIES)
        self._queue: deque[_Entry] = deque()
        self._sending: set[asyncio.Task[None]] = set()
        self._stream = ""
        self._closed = False

    @asynccontextmanager
    async def turn(self, *, wait: bool) -> AsyncGenerator[None]:
        """Reserve a slot while one entry is prepared and put. Raises PublishQueueFull if waiting is not allowed and the
        queue is full.
        """
        if not wait and self._in_flight >= self._most_queued:
            raise PublishQueueFull(self._in_flight)
        self._in_flight += 1
        try:
            async with self._room:
                yield
        finally:
            self._in_flight -= 1

    async def put(self, stream: str, data: bytes, *, tenant: str = "", most: int, first: bool = False) -> None:
        """Append one entry if the stream holds fewer than ``most``. ``first``: put it ahead of the entries queued here.

        Each entry is sent once: after ServerUnavailable it may or may not have been stored. Raises ServerUnavailable;
        ServerFull; RuntimeError after `close`.
        """
        if self._closed:
            raise RuntimeError("the client is closed")
        self._stream = stream
        entry = _Entry(data, tenant, most, asyncio.get_running_loop().create_future())
        if first:
            self._queue.appendleft(entry)
        else:
            self._queue.append(entry)
        if len(self._sending) < COMMANDS:
            task = asyncio.create_task(self._send_all(), name="publishing")
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
        with translated(self._server, stream):  # here, because each caller needs its own error
            await entry.taken

    async def close(self) -> None:
        """Finish what is in flight; entries still queued fail with RuntimeError."""
        self._closed = True
        while self._queue:
            entry = self._queue.popleft()
            if not entry.taken.done():
                entry.taken.set_exception(RuntimeError("the client is closed"))
        await asyncio.gather(*self._sending)

    async def _send_all(self) -> None:
        while batch := self._batch():
            try:
                self._pass_on(batch, await self._send(batch))
            except asyncio.CancelledError:  # `close` is cancelled: no caller may wait for an answer any more
                self._fail(batch, RuntimeError("the client is closed"))
                raise
            except Exception as e:
                self._fail(batch, e)

    def _pass_on(self, batch: Sequence[_Entry], replies: Sequence[Any]) -> None:
        for entry, reply in zip(batch, replies, strict=True):
            if entry.taken.done():
                continue
            if reply is None:
                full = ServerFull(self._stream, f"{entry.most} requests wait to be taken in")
                entry.taken.set_exception(full)
            else:
                entry.taken.set_result(None)

    @staticmethod
    def _fail(batch: Sequence[_Entry], error: Exception) -> None:
        for entry in batch:
            if not entry.taken.done():
                entry.taken.set_exception(error)

    def _batch(self) -> list[_Entry]:
        """The next batch, without entries whose callers have stopped waiting."""
        batch: list[_Entry] = []
        size = 0
        while self._queue and len(batch) < ENTRIES:
            entry = self._queue[0]
            if batch and size + len(entry.data) > JOINED_BYTES:
                break
            self._queue.popleft()
            if not entry.taken.done():
                batch.append(entry)
                size += len(entry.data)
        return batch

    async def _send(self, batch: list[_Entry]) -> list[Any]:
        args: list[Arg] = []
        for entry in batch:
            args += (entry.most, entry.data, entry.tenant)
        return await run_script(self._server, publish(self._stream, requests=args))
