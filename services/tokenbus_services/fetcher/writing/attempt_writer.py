"""The frames of one attempt: queued in order, held back while too much waits, ended by a refusal.

No attempt can crowd out the others: a flush takes little of each, and an attempt that brings much more than a model
writes (`heavy`) continues only while later stages have little of its partition waiting.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol
from uuid import uuid4

import msgspec

from tokenbus.bus.keys import Keys
from tokenbus.bus.liveness import wait_briefly
from tokenbus.bus.run_record import AttemptRecord
from tokenbus.bus.scripts import RawPart
from tokenbus.errors import AttemptRefused
from tokenbus.events.frames import Data, Ended, Lost, RawFrame, RawItem, encode
from tokenbus_services.fetcher.backpressure import Backpressure

BUFFER_BYTES = 256 * 1024
"""Bytes of one attempt that may wait for a flush; beyond that its socket is not read."""
FRAME_BYTES = 64 * 1024
"""Bytes of one attempt per flush, and of all attempts of a partition: roughly the content of one entry."""
HEAVY_BYTES = 512 * 1024
LIGHT_BYTES_S = 256 * 1024
"""An attempt is heavy while it is ``HEAVY_BYTES`` ahead of ``LIGHT_BYTES_S``. A model that writes a thousand chunks
a second stays below.
"""


class FlushQueue(Protocol):
    """What an attempt needs of the writer that flushes it (`RawWriter`)."""

    @property
    def keys(self) -> Keys:
        """Knows the attempt's partition."""
        ...

    @property
    def lags(self) -> Backpressure:
        """Which later stages lag."""
        ...

    def touch(self, attempt: AttemptWriter, urgent: bool) -> None:
        """Schedule the attempt for the next flush."""
        ...

    def now_ms(self) -> int:
        """The time shared by all workers, in Unix milliseconds."""
        ...

    async def record_of(self, run: str, attempt: int) -> AttemptRecord:
        """Read the attempt's state from the run's hash."""
        ...


class _JobMark(msgspec.Struct):
    """Behind the items with which the provider's job is as far as this says."""

    job: bytes


class FramesRefused(Exception):
    """An attempt's frames always fail the write command: its run ends, and the others continue."""


class AttemptWriter:
    """The frames of one attempt, in order. Created by `RawWriter.attempt`."""

    def __init__(
        self,
        writer: FlushQueue,
        run: str,
        turn: int,
        attempt: int,
        refused: Callable[[str], object],
        *,
        held: bool,
        max_added_s: float = 0.0,
    ) -> None:
        self.run = run
        self.partition = writer.keys.partition_of(run)
        self._run_key = writer.keys.run(run)
        self.turn = turn
        self.attempt = attempt
        self.items: list[RawItem | _JobMark] = []
        self.waiting = 0
        self.frames = 0
        self._composed = 0
        """How many items the next frame had when it was composed first."""
        self.name = uuid4().hex[:12]
        self.final = False
        self.held = held
        """Whether the run is under policies, and so waits for the policy stage too."""
        self.max_added_s = max_added_s
        """How long data that is not urgent may wait for a flush."""
        self.why_refused: str | None = None
        self.broken: Exception | None = None
        self.full_since: float | None = None
        """When the server first refused its frames for lack of memory."""
        self.writer = writer
        self._beyond = 0.0
        """Bytes ahead of the rate of a light attempt."""
        self._beyond_at = 0.0
        self._refused = refused
        self._progress: asyncio.Event | None = None
        """Exists only while the attempt waits: an event of its own is 0.8 KB, and most attempts never wait."""

    @property
    def must_wait(self) -> bool:
        """Whether `room` has something to wait for, or an error to raise."""
        lags, partition = self.writer.lags, self.partition
        return (
            self.waiting > BUFFER_BYTES
            or self._beyond > HEAVY_BYTES
            or self.why_refused is not None
            or self.broken is not None
            or lags.of(partition, "normalizer") is not None
            or (self.held and lags.of(partition, "policy") is not None)
        )

    def write_item(self, item: RawItem, *, urgent: bool = False, job: bytes = b"") -> None:
        """Queue an item. If `must_wait` is true after that, call `room` before the next item.

        ``job``: how far the item brings the provider's job. Such an item is in one frame, however large.
        """
        if isinstance(item, Data):
            size = len(item.data)
            self.waiting += size
            now = time.monotonic()
            self._beyond = max(0.0, self._beyond - (now - self._beyond_at) * LIGHT_BYTES_S) + size
            self._beyond_at = now
            pieces = range(0, size, FRAME_BYTES)
            self.items += [item] if job or len(pieces) <= 1 else [Data(item.data[i : i + FRAME_BYTES]) for i in pieces]
        else:
            self.items.append(item)
        if job:
            self.items.append(_JobMark(job))
        self.writer.touch(self, urgent)

    async def room(self) -> None:
        """Wait while too much is queued or a later stage lags. Raises AttemptRefused."""
        while self.waiting > BUFFER_BYTES:
            await self._flushed()
        if self._beyond > HEAVY_BYTES:
            await self.writer.lags.short(self.partition, adds=FRAME_BYTES)
        if event := self.writer.lags.of(self.partition, "normalizer"):
            while not await wait_briefly(event):
                await self._look()
                self._check()
        while self.held and (event := self.writer.lags.of(self.partition, "policy")):
            if not await wait_briefly(event):
                await self._look()
                self._check()
        self._check()

    async def write(self, item: RawItem, *, urgent: bool = False) -> None:
        """`write_item`, then `room`. Raises AttemptRefused."""
        self.write_item(item, urgent=urgent)
        if self.must_wait:
            await self.room()

    async def end(self, item: Ended | Lost, *, job: bytes = b"") -> None:
        """Queue the attempt's last item and wait until everything is written. ``job``: see `write_item`. Raises
        AttemptRefused.
        """
        self.items += [item, _JobMark(job)] if job else [item]
        self.final = True
        self.writer.touch(self, True)
        while self.items:
            await self._flushed()
        self._check()

    def refuse(self, reason: str) -> None:
        """Handle the server's refusal of this attempt."""
        self.why_refused = reason
        self.items.clear()
        self._progressed()
        self._refused(reason)

    def break_off(self, error: Exception) -> None:
        """Handle a permanent error: the server will never accept these frames, so the run cannot continue."""
        self.broken = error
        self.items.clear()
        self._progressed()

    async def _look(self) -> None:
        """Poll the run's status: an attempt that is not writing never learns that it was refused."""
        record = await self.writer.record_of(self.run, self.attempt)
        if not record.is_open:
            self.refuse("over")
        elif record.bypassed:
            self.held = False

    def part(self) -> tuple[RawPart, int, int]:
        """Return the first queued items as one frame, with their count and their size in bytes. They stay queued
        until written.

        A frame that a full server refused has the same items again, because its command may have been sent twice and
        one of them may still arrive. Only an attempt's end goes with all that waits: ended runs give the server room.
        """
        count = size = 0
        for item in self.items:
            more = len(item.data) if isinstance(item, Data) else 0
            full = size + more > FRAME_BYTES and not isinstance(item, _JobMark)  # a mark goes with its item
            if count and (full or (count == self._composed and not self.final)):
                break
            count, size = count + 1, size + more
        self._composed = self._composed or count
        marks = [item.job for item in self.items[:count] if isinstance(item, _JobMark)]
        items = _joined(self.items[:count])
        final = self.final and count == len(self.items)
        frame = encode(RawFrame(self.turn, self.attempt, self.frames, self.writer.now_ms(), items))
        part = RawPart(self.run, self._run_key, self.attempt, self.frames, final, frame, self.name, *marks[-1:])
        return part, count, size

    def written(self, count: int, size: int) -> None:
        """Remove the first ``count`` items, of ``size`` bytes, which are on the server now."""
        del self.items[:count]
        self.waiting -= size
        self.frames += 1
        self._composed = 0
        self.full_since = None
        self._progressed()

    def is_longer(self, count: int) -> bool:
        """Whether a frame of ``count`` items had fewer of them before."""
        return count > self._composed

    def written_before(self) -> None:
        """Remove the items of the frame's first form, which is on the server. The rest is to be written."""
        size = sum(len(item.data) for item in self.items[: self._composed] if isinstance(item, Data))
        self.written(self._composed, size)
        self.writer.touch(self, True)

    def _progressed(self) -> None:
        if self._progress:
            self._progress.set()

    async def _flushed(self) -> None:
        """Wait briefly for a flush."""
        self._check()
        self._progress = asyncio.Event()
        try:
            if not await wait_briefly(self._progress):
                self.writer.touch(self, False)  # make sure that the next flush includes it
        finally:
            self._progress = None

    def _check(self) -> None:
        if self.why_refused is not None:
            raise AttemptRefused(self.run, self.attempt, self.why_refused)
        if self.broken is not None:
            raise FramesRefused(f"the server does not take the attempt's frames: {self.broken}") from self.broken


def _joined(items: list[RawItem | _JobMark]) -> list[RawItem]:
    """Join neighbouring pieces of the body; without the marks."""
    joined: list[RawItem] = []
    pieces: list[bytes] = []
    for item in items:
        if isinstance(item, Data):
            pieces.append(item.data)
            continue
        if isinstance(item, _JobMark):
            continue
        if pieces:
            joined.append(Data(b"".join(pieces)))
            pieces = []
        joined.append(item)
    if pieces:
        joined.append(Data(b"".join(pieces)))
    return joined
