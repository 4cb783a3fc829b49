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

from tokenbus.bus import scripts
from tokenbus.bus.keys import Keys
from tokenbus.bus.outage import outlast
from tokenbus.bus.scripts import RawPart
from tokenbus.bus.scripts.runs import LET_GO
from tokenbus.bus.send import send_many
from tokenbus.bus.server import Server
from tokenbus.errors import AttemptRefused
from tokenbus.events.frames import ANY_FRAME, Data, Ended, Lost, RawFrame, RawItem, encode
from tokenbus_services.fetcher.lag import LAG_POLL_S, Lags
from tokenbus_services.worker.defects import log_defect

BUFFER_BYTES = 256 * 1024
"""Bytes of one attempt that may wait for a flush; beyond it the socket is not read."""
LOOK_S = 1.0
"""A run that waits for the policy stage looks this often whether it need wait any more: it may have ended by now."""
TORN = (b"frame ", b"writer ")
"""How a refusal begins where the attempt is open, but what lies on the server is not what this writer wrote: it lost
frames in a fail-over, or gave the attempt to a second worker. None of the two can go on: the attempt ends as lost."""


class AttemptWriter:
    """The frames of one attempt, in order. Made by `RawWriter.attempt`."""

    def __init__(
        self, writer: RawWriter, run: str, turn: int, attempt: int, refused: Callable[[str], object], *, held: bool
    ) -> None:
        self.run = run
        self.partition = writer.keys.partition_of(run)
        self.turn = turn
        self.attempt = attempt
        self.items: list[RawItem] = []
        self.waiting = 0
        self.frames = 0
        self.name = uuid4().hex[:12]
        self.final = False
        self.held = held
        """Policies judge the run, so it waits for their stage too."""
        self.why_refused: str | None = None
        self.flushed = asyncio.Event()
        self.writer = writer
        self._refused = refused

    @property
    def must_wait(self) -> bool:
        """Whether `room` has something to wait for, or to raise."""
        lags, partition = self.writer.lags, self.partition
        return (
            self.waiting > BUFFER_BYTES
            or self.why_refused is not None
            or lags.of(partition, "normalizer") is not None
            or (self.held and lags.of(partition, "policy") is not None)
        )

    def put(self, item: RawItem, *, urgent: bool = False) -> None:
        """Queue an item. While it `must_wait` after that, `room` comes before the next."""
        self.items.append(item)
        if isinstance(item, Data):
            self.waiting += len(item.data)
        self.writer.touch(self, urgent)

    async def room(self) -> None:
        """Wait while too much is queued or a later stage lags. Raises AttemptRefused."""
        while self.waiting > BUFFER_BYTES:
            self.flushed.clear()
            self._check()
            await self.flushed.wait()
        if event := self.writer.lags.of(self.partition, "normalizer"):
            await event.wait()
        while self.held and (event := self.writer.lags.of(self.partition, "policy")):
            try:
                async with asyncio.timeout(LOOK_S):
                    await event.wait()
            except TimeoutError:
                await self._look()
                self._check()
        self._check()

    async def write(self, item: RawItem, *, urgent: bool = False) -> None:
        """`put`, and `room` after it. Raises AttemptRefused."""
        self.put(item, urgent=urgent)
        if self.must_wait:
            await self.room()

    async def end(self, item: Ended | Lost) -> None:
        """Queue the attempt's last item and wait until all is written. Raises AttemptRefused."""
        self.items.append(item)
        self.final = True
        self.writer.touch(self, True)
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

    async def _look(self) -> None:
        """An attempt that writes nothing hears of no refusal."""
        status, attempt, closed, let_go = await self.writer.state_of(self.run)
        mine = str(self.attempt).encode()
        if status != b"open" or attempt != mine or closed == mine:
            self.refuse("over")
        elif let_go:
            self.held = False

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
        self.lags = Lags(server, keys, lag_bytes=lag_bytes)
        self._server = server
        self._linger_s = linger_s
        self._pending: dict[AttemptWriter, None] = {}
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

    def attempt(
        self, run: str, turn: int, attempt: int, refused: Callable[[str], object], *, held: bool = False
    ) -> AttemptWriter:
        """The writer of one attempt; ``refused`` is called as soon as the server takes nothing more of it. ``held``:
        policies judge the run, so that it waits for their stage too."""
        return AttemptWriter(self, run, turn, attempt, refused, held=held)

    async def state_of(self, run: str) -> list[bytes | None]:
        """The run's status, its attempt, the one that is closed, and whether its policies let go of it."""
        fields = ["status", "attempt", "closed", LET_GO]
        return await outlast(lambda: self._server.client.hmget(self.keys.run(run), fields), what="state of a run")

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

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        flushed_at = 0.0
        while True:
            if self.lags.any:
                await self.lags.look()
            if not self._pending:
                self._wake.clear()
                await self._wait(self._wake, LAG_POLL_S if self.lags.any else None)
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
        calls = [
            self._call(partition, [p[1] for p in group], held=any(p[0].held for p in group))
            for partition, group in parts.items()
        ]
        torn: list[tuple[AttemptWriter, bytes]] = []
        for (partition, group), reply in zip(parts.items(), await self._send(calls), strict=True):
            verdicts, (lag, *of_policies) = reply[: len(group)], reply[len(group) :]
            self.lags.told(partition, "normalizer", lag)
            for lag in of_policies:
                self.lags.told(partition, "policy", lag)
            for (attempt, _, count, size), verdict in zip(group, verdicts, strict=True):
                if verdict in (b"ok", b"already"):
                    attempt.written(count, size)
                elif verdict.startswith(TORN):
                    torn.append((attempt, verdict))
                else:
                    attempt.refuse(verdict.decode())
        for attempt, verdict in torn:
            await self.lost(attempt.run, attempt.turn, attempt.attempt, "the server lost frames of this attempt")
            attempt.refuse(verdict.decode())

    def _call(self, partition: int, parts: list[RawPart], *, held: bool = False) -> scripts.Call:
        keys = self.keys
        policy = keys.lease(partition, "policy") if held else None
        normalizer = keys.lease(partition, "normalizer")
        return scripts.append_raw(keys.topic(partition, "raw"), normalizer, parts, policy_lease=policy)

    async def _send(self, calls: list[scripts.Call]) -> list[list[Any]]:
        """Until the server has it: a frame that arrived although its reply was lost is told as ``already``."""
        return await outlast(lambda: send_many(self._server, calls), what="raw frames")


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
