"""Writes provider bytes to `raw`: batched across runs, as long as their requests allow, and fenced.

The cost unit is the wake-up across processes, not the event. So one flush carries the data of all runs of this process,
one entry per partition. Data waits for its flush at most as long as its run allows (`max_added_ms`). Beyond that, while
the process is more than half busy, flushes keep a distance that grows to the linger. Data that begins or ends a block
never waits (`urgent`); what waits goes with it.

What waits, and when an attempt has to wait, is the attempt's own matter (attempt_writer.py).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from redis.exceptions import RedisError

from tokenbus.bus import scripts
from tokenbus.bus.keys import Keys
from tokenbus.bus.liveness import IDLE_S, Liveness, stop_task, wait_briefly
from tokenbus.bus.run_record import AttemptRecord, read_attempt
from tokenbus.bus.scripts import RawPart
from tokenbus.bus.server.retry import ISOLATED_TRIES, MAX_TRIES, retry_until_available
from tokenbus.bus.server.run_scripts import run_scripts
from tokenbus.bus.server.server import Server
from tokenbus.bus.stage.chain import Chain, Flush
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import ANY_FRAME, Ended, Lost, ProviderJob, RawFrame, encode, job_decoder
from tokenbus_services.fetcher.backpressure import LAG_POLL_S, Backpressure
from tokenbus_services.fetcher.writing.attempt_writer import FRAME_BYTES, AttemptWriter
from tokenbus_services.runtime.task_failures import LoggedTasks

FULL_PATIENCE_S = 10.0
"""How long an attempt waits while the server is out of memory. Then it ends, because only ended runs free memory."""
FULL_POLL_S = 0.2
TORN = (b"frame ", b"writer ")
"""Prefixes of refusals of an open attempt whose frames on the server are not this writer's: the server lost frames
in a fail-over, or gave the attempt to a second worker. Neither can continue, so the attempt ends as lost.
"""


class _Flushed(msgspec.Struct, frozen=True, eq=False):
    """What one flush contains of one attempt."""

    attempt: AttemptWriter
    part: RawPart
    items: int
    size: int


class RawWriter:
    """Flushes what its attempts queue; one per process. Call `open`, and `close` when all attempts have ended."""

    def __init__(
        self,
        server: Server,
        keys: Keys,
        *,
        linger_s: float,
        lag_bytes: int,
        max_added_s: float = 0.0,
        liveness: Liveness | None = None,
    ) -> None:
        """``max_added_s``: how long data of an attempt waits at most, unless its request says so."""
        self.keys = keys
        self.lags = Backpressure(server, keys, lag_bytes=lag_bytes)
        self._server = server
        self._linger = Linger(linger_s)
        self._liveness = liveness or Liveness()
        self._pending: dict[AttemptWriter, None] = {}
        self._max_added_s = max_added_s
        self._due = math.inf
        """When the next flush is due, by the loop's clock; 0: at once."""
        self._wake = asyncio.Event()
        """Set when the next flush is due sooner than before."""
        self._task: asyncio.Task[None] | None = None
        self._apart = server.topology == "cluster"
        """Whether partitions are on different nodes; a node that is away must delay only its own partitions."""
        self._flushes = LoggedTasks("raw flush", most=lambda: keys.partitions)
        self.chain: Chain | None = None
        """Writes what the stages of this process make of a flush together with it."""
        self._late: dict[int, dict[AttemptWriter, None]] = {}
        """By partition being flushed: attempts to flush after it."""

    async def open(self) -> None:
        """Start flushing."""
        self._task = self._liveness.start(self._run(), name="raw writer")

    @property
    def healthy(self) -> bool:
        """Whether the flush task is alive; without it this worker can do nothing."""
        return self._task is not None and not self._task.done()

    async def close(self) -> None:
        """Stop flushing."""
        await stop_task(self._task)
        await self._flushes.close()
        await self.lags.close()

    def attempt(
        self, run: str, turn: int, attempt: int, refused: Callable[[str], object], *, held: bool = False
    ) -> AttemptWriter:
        """Create the writer of one attempt. ``refused`` is called as soon as the server refuses the attempt.
        ``held``: the run is under policies, so it waits for the policy stage too.
        """
        return AttemptWriter(self, run, turn, attempt, refused, held=held, max_added_s=self._max_added_s)

    def now_ms(self) -> int:
        """The time shared by all workers, in Unix milliseconds."""
        return self._server.clock.now_ms()

    async def record_of(self, run: str, attempt: int) -> AttemptRecord:
        """Read the attempt's state from the run's hash."""
        key = self.keys.run(run)
        return await retry_until_available(
            self._server, lambda: read_attempt(self._server.client, key, attempt), what="state of a run"
        )

    async def take_job(self, attempt: AttemptWriter) -> tuple[ProviderJob, int] | None:
        """Make ``attempt`` the writer of an attempt that has a job at its provider, in place of an earlier one. Returns
        the job, and how often it was taken since it last made progress; None if the attempt is over.
        """
        call = scripts.take_job(self.keys.run(attempt.run), attempt=attempt.attempt, writer=attempt.name)
        [reply] = await self._send([call])
        if not reply:
            return None
        attempt.frames = int(reply[0])
        return job_decoder.decode(reply[1]), int(reply[2])

    async def lost(self, run: str, turn: int, attempt: int, reason: str) -> None:
        """End an attempt that no worker runs, with any frames. Does nothing if it has ended
        already.
        """
        frame = encode(RawFrame(turn, attempt, ANY_FRAME, self.now_ms(), [Lost(reason)]))
        part = RawPart(run=run, run_key=self.keys.run(run), attempt=attempt, n=ANY_FRAME, final=True, data=frame)
        await self._send([self._call(self.keys.partition_of(run), [part])])

    def touch(self, attempt: AttemptWriter, urgent: bool) -> None:
        """Schedule the attempt for the next flush."""
        self._pending[attempt] = None
        if self._due == 0.0:
            return
        due = 0.0 if urgent else asyncio.get_running_loop().time() + attempt.max_added_s
        if due < self._due:
            self._due = due
            self._wake.set()

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        flushed_at = 0.0
        while True:
            if self.lags.any:
                await self.lags.look()
            if not self._pending:
                self._wake.clear()
                await wait_briefly(self._wake, timeout_s=LAG_POLL_S if self.lags.any else IDLE_S)
                continue
            now = clock()
            if self._due and (rest := max(self._due, flushed_at + self._linger.seconds(now)) - now) > 0:
                self._wake.clear()
                await wait_briefly(self._wake, timeout_s=rest)
                continue
            self._due = math.inf
            flushed_at = now
            await self._flush()

    async def _flush(self) -> None:
        pending, self._pending = self._pending, {}
        if not self._apart:
            await self._flush_all(pending)
            return
        groups: defaultdict[int, list[AttemptWriter]] = defaultdict(list)
        for attempt in pending:
            if (late := self._late.get(attempt.partition)) is not None:
                late[attempt] = None
            else:
                groups[attempt.partition].append(attempt)
        self._late |= {partition: {} for partition in groups}
        await self._flushes.run(partial(self._flush_apart, partition, group) for partition, group in groups.items())

    async def _flush_apart(self, partition: int, attempts: Collection[AttemptWriter]) -> None:
        try:
            await self._flush_all(attempts)
        finally:
            for attempt in self._late.pop(partition):
                self.touch(attempt, True)

    async def _flush_all(self, attempts: Collection[AttemptWriter]) -> None:
        groups: dict[int, list[_Flushed]] = {}
        sizes: defaultdict[int, int] = defaultdict(int)
        unfinished: set[AttemptWriter] = set()
        for attempt in attempts:
            if not attempt.items:
                continue
            partition = attempt.partition
            if sizes[partition] >= FRAME_BYTES:
                self.touch(attempt, True)  # it is among the first in the next flush
                continue
            try:
                part, count, size = attempt.part()
            except Exception as e:  # concerns this attempt only
                attempt.break_off(e)
                continue
            if count < len(attempt.items):
                unfinished.add(attempt)
            sizes[partition] += size
            groups.setdefault(partition, []).append(_Flushed(attempt, part, count, size))
        if not groups:
            return
        torn: list[tuple[AttemptWriter, bytes]] = []
        for group, reply in await self._written(list(groups.values())):
            if isinstance(reply, Exception):
                group[0].attempt.break_off(reply)
                continue
            partition = group[0].attempt.partition
            verdicts, (lag, *of_policies) = reply[: len(group)], reply[len(group) :]
            self.lags.set_lag(partition, "normalizer", lag)
            for lag in of_policies:
                self.lags.set_lag(partition, "policy", lag)
            for each, verdict in zip(group, verdicts, strict=True):
                if verdict == b"already" and each.attempt.is_longer(each.items):
                    await self._written_before(each)
                elif verdict in (b"ok", b"already"):
                    each.attempt.written(each.items, each.size)
                    if each.attempt in unfinished:
                        self.touch(each.attempt, True)
                elif verdict == b"full":
                    await self._wait_for_memory(each.attempt)
                elif verdict.startswith(TORN):
                    torn.append((each.attempt, verdict))
                else:
                    each.attempt.refuse(verdict.decode())
        for attempt, verdict in torn:
            try:
                await self.lost(attempt.run, attempt.turn, attempt.attempt, "the server lost frames of this attempt")
            except (RedisError, OSError) as e:
                attempt.break_off(e)
            else:
                attempt.refuse(verdict.decode())

    async def _written_before(self, flushed: _Flushed) -> None:
        """The server has a form of this frame. An attempt that is still open has the earlier form, without its end."""
        attempt = flushed.attempt
        try:
            record = await self.record_of(attempt.run, attempt.attempt)
        except (RedisError, OSError) as e:  # concerns this attempt only
            attempt.break_off(e)
            return
        if record.is_open:
            attempt.written_before()
        else:
            attempt.written(flushed.items, flushed.size)

    async def _written(self, groups: list[list[_Flushed]]) -> list[tuple[list[_Flushed], list[Any] | Exception]]:
        """Write each group, on the short path if possible, and return its reply. If the server refuses them together,
        write each attempt on its own, with its reply or its error.
        """
        written: list[tuple[list[_Flushed], list[Any] | Exception]] = []
        if self.chain:
            flushes = [
                Flush(group[0].attempt.partition, [each.part for each in group], _any_held(group)) for group in groups
            ]
            replies = await self.chain.write(flushes)
            written += [(group, reply) for group, reply in zip(groups, replies, strict=True) if reply is not None]
            groups = [group for group, reply in zip(groups, replies, strict=True) if reply is None]
        if not groups:
            return written
        try:
            replies = await self._send([self._call_of(group) for group in groups])
            return written + list(zip(groups, replies, strict=True))
        except (RedisError, OSError):
            pass
        for each in [each for group in groups for each in group]:
            try:
                [reply] = await self._send([self._call_of([each])], tries=ISOLATED_TRIES)
            except (RedisError, OSError) as e:
                reply = e
            written.append(([each], reply))
        return written

    def _call_of(self, group: list[_Flushed]) -> scripts.ScriptCall:
        return self._call(group[0].attempt.partition, [each.part for each in group], held=_any_held(group))

    async def _wait_for_memory(self, attempt: AttemptWriter) -> None:
        """The server only accepts this attempt's end: retry for a while, then end it."""
        loop = asyncio.get_running_loop()
        attempt.full_since = attempt.full_since or loop.time()
        if loop.time() < attempt.full_since + FULL_PATIENCE_S:
            loop.call_later(FULL_POLL_S, self.touch, attempt, True)
            return
        problem = "the bus's server is out of memory"
        error = ErrorInfo(code="server_full", kind="overloaded", message=problem, retryable=True)
        frame = encode(RawFrame(attempt.turn, attempt.attempt, ANY_FRAME, self.now_ms(), [Ended(error)]))
        part = RawPart(
            run=attempt.run,
            run_key=self.keys.run(attempt.run),
            attempt=attempt.attempt,
            n=ANY_FRAME,
            final=True,
            data=frame,
        )
        try:
            await self._send([self._call(attempt.partition, [part])])
        except (RedisError, OSError) as e:  # concerns this attempt only
            attempt.break_off(e)
        else:
            attempt.refuse(error.message)

    def _call(self, partition: int, parts: list[RawPart], *, held: bool = False) -> scripts.ScriptCall:
        keys = self.keys
        policy = keys.lease(partition, "policy") if held else None
        normalizer = keys.lease(partition, "normalizer")
        return scripts.append_raw(keys.topic(partition, "raw"), normalizer, parts, policy_lease=policy)

    async def _send(self, calls: list[scripts.ScriptCall], *, tries: int = MAX_TRIES) -> list[list[Any]]:
        """Retry until the server accepts it; a frame whose reply was lost is answered with ``already``."""
        return await retry_until_available(
            self._server, lambda: run_scripts(self._server, calls), what="raw frames", tries=tries
        )


def _any_held(group: list[_Flushed]) -> bool:
    return any(each.attempt.held for each in group)


# How long a flush gathers: by need. Nothing waits while the process is less than half busy.

WINDOW_S = 0.1
"""How long one look at the process lasts."""
IDLE = 0.5
"""Below this share of the time nothing waits."""
_SCHEDULED = Path("/proc/thread-self/schedstat")


def busy_s() -> float:
    """Seconds in which this thread ran, or was ready and waited for a core. Only Linux reports the latter."""
    try:
        ran, waited, _ = _SCHEDULED.read_text().split()
    except OSError:
        return time.thread_time()
    return (int(ran) + int(waited)) / 1e9


class Linger:
    """The wait before a flush: 0 while the event loop is less than half busy, ``most_s`` when it is saturated."""

    def __init__(self, most_s: float, *, busy_s: Callable[[], float] = busy_s) -> None:
        self._most_s = most_s
        self._busy_s = busy_s
        self._looked_at = 0.0
        self._busy_then = 0.0
        self._now_s = 0.0

    def seconds(self, now: float) -> float:
        """How long the next flush gathers; ``now`` is in seconds of any monotonic clock."""
        passed = now - self._looked_at
        if passed >= WINDOW_S:
            busy = self._busy_s()
            share = min(1.0, (busy - self._busy_then) / passed) if self._looked_at else 0.0
            self._now_s = self._most_s * max(0.0, share - IDLE) / (1.0 - IDLE)
            self._looked_at, self._busy_then = now, busy
        return self._now_s
