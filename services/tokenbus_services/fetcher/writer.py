"""Writes provider bytes to `raw`: gathered over runs for a moment under load, at once while idle, and fenced.

The unit of cost is the wake-up across processes and not the event, so one flush carries what all runs of this process
have, one entry a partition. While idle a read goes out at once; when reads come faster than the linger, a flush
gathers up to that long. What begins or ends a block never waits (`urgent`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from redis.exceptions import RedisError

from tokenbus.bus import scripts
from tokenbus.bus.keys import Keys
from tokenbus.bus.outage import outlast
from tokenbus.bus.scripts import RawPart
from tokenbus.bus.send import send_many
from tokenbus.bus.server import Server
from tokenbus.errors import AttemptRefused
from tokenbus.events.frames import ANY_FRAME, Data, Ended, Lost, RawFrame, RawItem, encode
from tokenbus_services.worker.defects import log_defect

BUFFER_BYTES = 256 * 1024
"""Bytes of one attempt that may wait for a flush; beyond it the socket is not read."""
LAG_POLL_S = 0.02
TORN = (b"frame ", b"writer ")
"""How a refusal begins where the attempt is open, but what lies on the server is not what this writer wrote: it lost
frames in a fail-over, or gave the attempt to a second worker. None of the two can go on: the attempt ends as lost."""


class AttemptWriter:
    """The frames of one attempt, in order. Made by `RawWriter.attempt`."""

    def __init__(self, writer: RawWriter, run: str, turn: int, attempt: int, refused: Callable[[str], object]) -> None:
        self.run = run
        self.partition = writer.keys.partition_of(run)
        self.turn = turn
        self.attempt = attempt
        self.items: list[RawItem] = []
        self.waiting = 0
        self.frames = 0
        self.name = uuid4().hex[:12]
        self.final = False
        self.why_refused: str | None = None
        self.flushed = asyncio.Event()
        self._writer = writer
        self._refused = refused

    async def write(self, item: RawItem, *, urgent: bool = False) -> None:
        """Queue an item; waits while too much is queued or a later stage lags. Raises AttemptRefused."""
        self.items.append(item)
        if isinstance(item, Data):
            self.waiting += len(item.data)
        self._writer.touch(self, urgent)
        while self.waiting > BUFFER_BYTES:
            self.flushed.clear()
            self._check()
            await self.flushed.wait()
        await self._writer.caught_up(self.partition)
        self._check()

    async def end(self, item: Ended | Lost) -> None:
        """Queue the attempt's last item and wait until all is written. Raises AttemptRefused."""
        self.items.append(item)
        self.final = True
        self._writer.touch(self, True)
        while self.items:
            self.flushed.clear()
            self._check()
            await self.flushed.wait()
        self._check()

    def refuse(self, reason: str) -> None:
        """The server takes nothing more of this attempt."""
        self.why_refused = reason
        self.items.clear()
        self.flushed.set()
        self._refused(reason)

    def part(self, keys: Keys) -> RawPart:
        """What waits, as one frame. The items stay until the server has it."""
        frame = RawFrame(self.turn, self.attempt, self.frames, time.time_ns() // 1_000_000, _joined(self.items))
        return RawPart(self.run, keys.run(self.run), self.attempt, self.frames, self.final, encode(frame), self.name)

    def written(self, count: int, size: int) -> None:
        """The first ``count`` items, of ``size`` bytes, are on the server."""
        del self.items[:count]
        self.waiting -= size
        self.frames += 1
        self.flushed.set()

    def _check(self) -> None:
        if self.why_refused is not None:
            raise AttemptRefused(self.run, self.attempt, self.why_refused)


class RawWriter:
    """One a process: flushes what its attempts queue. Call `open`, and `close` when all attempts ended."""

    def __init__(self, server: Server, keys: Keys, *, linger_s: float, lag_bytes: int) -> None:
        self.keys = keys
        self._server = server
        self._linger_s = linger_s
        self._lag_bytes = lag_bytes
        self._pending: dict[AttemptWriter, None] = {}
        self._lagging: dict[int, asyncio.Event] = {}
        """Partitions whose next stage is too far behind, each with what its attempts wait for."""
        self._wake = asyncio.Event()
        self._urgent = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Begin to flush."""
        self._task = asyncio.create_task(self._run(), name="raw writer")
        self._task.add_done_callback(log_defect)

    @property
    def healthy(self) -> bool:
        """Whether it flushes: a defect that ended it leaves a worker that can do nothing."""
        return self._task is not None and not self._task.done()

    async def close(self) -> None:
        """Stop to flush."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def attempt(self, run: str, turn: int, attempt: int, refused: Callable[[str], object]) -> AttemptWriter:
        """The writer of one attempt; ``refused`` is called as soon as the server takes nothing more of it."""
        return AttemptWriter(self, run, turn, attempt, refused)

    async def lost(self, run: str, turn: int, attempt: int, reason: str) -> None:
        """End an attempt that nobody works on any more, whatever its frames were. No harm where it ended already."""
        frame = encode(RawFrame(turn, attempt, ANY_FRAME, time.time_ns() // 1_000_000, [Lost(reason)]))
        part = RawPart(run, self.keys.run(run), attempt, ANY_FRAME, True, frame)
        await self._send([self._call(self.keys.partition_of(run), [part])])

    def touch(self, attempt: AttemptWriter, urgent: bool) -> None:
        """The attempt has something to flush."""
        self._pending[attempt] = None
        self._wake.set()
        if urgent:
            self._urgent.set()

    async def caught_up(self, partition: int) -> None:
        """Wait while a later stage is too far behind in this partition."""
        if event := self._lagging.get(partition):
            await event.wait()

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        flushed_at = 0.0
        while True:
            if self._lagging:
                await self._look_at_lag()
            if not self._pending:
                self._wake.clear()
                await self._wait(self._wake, LAG_POLL_S if self._lagging else None)
                continue
            rest = flushed_at + self._linger_s - clock()
            if rest > 0 and not self._urgent.is_set():
                await self._wait(self._urgent, rest)
            self._urgent.clear()
            flushed_at = clock()
            await self._flush()

    @staticmethod
    async def _wait(event: asyncio.Event, timeout: float | None) -> None:
        try:
            async with asyncio.timeout(timeout):
                await event.wait()
        except TimeoutError:
            pass

    async def _flush(self) -> None:
        pending, self._pending = self._pending, {}
        parts: dict[int, list[tuple[AttemptWriter, RawPart, int, int]]] = {}
        for attempt in pending:
            if attempt.items:
                part = (attempt, attempt.part(self.keys), len(attempt.items), attempt.waiting)
                parts.setdefault(attempt.partition, []).append(part)
        if not parts:
            return
        calls = [self._call(partition, [p[1] for p in group]) for partition, group in parts.items()]
        torn: list[tuple[AttemptWriter, bytes]] = []
        for (partition, group), reply in zip(parts.items(), await self._send(calls), strict=True):
            if reply[-1] > self._lag_bytes:
                self._lagging.setdefault(partition, asyncio.Event())
            for (attempt, _, count, size), verdict in zip(group, reply[:-1], strict=True):
                if verdict in (b"ok", b"already"):
                    attempt.written(count, size)
                elif verdict.startswith(TORN):
                    torn.append((attempt, verdict))
                else:
                    attempt.refuse(verdict.decode())
        for attempt, verdict in torn:
            await self.lost(attempt.run, attempt.turn, attempt.attempt, "the server lost frames of this attempt")
            attempt.refuse(verdict.decode())

    def _call(self, partition: int, parts: list[RawPart]) -> scripts.Call:
        keys = self.keys
        return scripts.append_raw(keys.topic(partition, "raw"), keys.lease(partition, "normalizer"), parts)

    async def _send(self, calls: list[scripts.Call]) -> list[list[Any]]:
        """Until the server has it: a frame that arrived although its reply was lost is told as ``already``."""
        return await outlast(lambda: send_many(self._server, calls), what="raw frames")

    async def _look_at_lag(self) -> None:
        for partition in list(self._lagging):
            try:
                arrived, done = await self._server.client.hmget(
                    self.keys.lease(partition, "normalizer"), ["arrived", "done"]
                )
            except (RedisError, OSError):
                return
            if int(arrived or 0) - int(done or 0) <= self._lag_bytes // 2:
                self._lagging.pop(partition).set()


def _joined(items: list[RawItem]) -> list[RawItem]:
    """Neighbouring pieces of the body as one."""
    joined: list[RawItem] = []
    pieces: list[bytes] = []
    for item in items:
        if isinstance(item, Data):
            pieces.append(item.data)
            continue
        if pieces:
            joined.append(Data(b"".join(pieces)))
            pieces = []
        joined.append(item)
    if pieces:
        joined.append(Data(b"".join(pieces)))
    return joined
