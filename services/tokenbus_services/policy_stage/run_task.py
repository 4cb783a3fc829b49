"""One run under its policies, in the worker: drafts go to an executor, and what is known is told to the parser.

An executor may end at any time, by this run's fault or by another's. Then the run begins anew in another one, with all
its drafts, and what is told twice is heard once (`tokenbus.core.run.gated`). What ends its executors too often is
called no more: how often, the run's hash knows, so that no other worker begins to count anew.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import structlog

from tokenbus.events.frames import WHOLE_RUN, Decision, PolicyVerdict
from tokenbus.policy.policy_runner import OnError
from tokenbus_services.policy_stage.blame import WORDS, Fault, Sentence, Starts, reason, sentence
from tokenbus_services.policy_stage.executors import Executors
from tokenbus_services.policy_stage.messages import Said

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

UNCOUNT_S = 1.0
STEPS_A_RULING = 200
"""Most steps in one ruling."""


class RunRecord(Protocol):
    """The run on the server, as long as this worker has its partition."""

    async def starts(self) -> dict[str, Starts] | None:
        """What counts against its policies; None: the run is not open any more, or another worker's."""
        ...

    async def count(self, policy: str, by: int, *, failed_at: int | None = None) -> Starts | None:
        """Change that. None: as for `starts`."""
        ...

    async def tell(self, start: int, steps: list[PolicyVerdict]) -> bool:
        """Rule; False: nobody wants to know of it any more. ``start``: blocks are numbered anew in each."""
        ...


class PolicyRunTask:
    """A run's task. A slow policy holds up this run and no other. `start` it once; `close` ends it at any time."""

    def __init__(
        self,
        run: str,
        policies: tuple[str, ...],
        *,
        record: Callable[[], Awaitable[RunRecord | None]],
        executors: Executors,
        on_error: Mapping[str, OnError],
        most_starts: int,
        reassure_s: float,
        waiting: Callable[[int], None],
    ) -> None:
        """``record``: waited for once; None: the run is another worker's. ``waiting``: told how many drafts more wait,
        or fewer."""
        self.run = run
        self.frames: list[bytes] = []
        """All that was drafted of it."""
        self._policies = policies
        self._get_record = record
        self._executors = executors
        self._on_error = on_error
        self._most_starts = most_starts
        self._reassure_s = reassure_s
        self._waiting = waiting
        self._drafts = self._seen = 0
        """Those that came, and those that policies have had."""
        self._start = -1
        self._fed: Callable[[list[bytes]], None] | None = None
        """Gives its executor more."""
        self._reassuring = False
        """The run waits for its turn, and those who wait for it are to be told so."""
        self._steps: deque[PolicyVerdict] = deque()
        self._to_tell = asyncio.Event()
        self._outcome: asyncio.Future[Fault | bool | None]
        self._suspect = False
        self._task: asyncio.Task[None] | None = None

    def add(self, frame: bytes, drafts: int) -> None:
        """This comes next."""
        self.frames.append(frame)
        self._drafts += drafts
        self._waiting(drafts)
        if self._fed:
            self._fed([frame])

    def start(self) -> None:
        """Begin, or go on."""
        if self._task is None:
            self._task = asyncio.create_task(self._work(), name=f"policies of {self.run}")

    def close(self) -> None:
        """The run needs no judgement any more."""
        self._waiting(self._seen - self._drafts)
        self._seen = self._drafts
        if self._task:
            self._task.cancel()

    async def closed(self) -> None:
        """Wait until nothing of it is under way. Call it after `close`."""
        if self._task:
            await asyncio.wait({self._task})

    # --- what its executor says -----------------------------------------------------------------------------------

    def said(self, message: Said) -> None:
        if message.seen > self._seen:
            self._waiting(self._seen - message.seen)
            self._seen = message.seen
        self._steps.extend(message.steps)
        self._to_tell.set()

    def waits(self) -> None:
        self._reassuring = True
        self._to_tell.set()

    def finished(self) -> None:
        self._came_to(None)

    def lost(self, fault: Fault | None, *, suspect: bool) -> None:
        self._suspect = self._suspect or suspect
        self._came_to(fault or False)

    def _came_to(self, outcome: Fault | bool | None) -> None:
        self._fed = None
        if not self._outcome.done():
            self._outcome.set_result(outcome)

    # --- the task -------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        try:
            record = await self._get_record()
            starts = await record.starts() if record else None
            if record is None or starts is None:
                return
            async with asyncio.TaskGroup() as tasks:
                judging = tasks.create_task(self._judge(record, starts))
                judging.add_done_callback(lambda _: self._to_tell.set())
                await self._telling(record, judging)
                judging.cancel()
        except Exception:
            # Nothing that a policy does: its executor sees to that. The parser's patience ends the run.
            log.exception("judging_failed", run=self.run)

    async def _judge(self, record: RunRecord, starts: dict[str, Starts]) -> None:
        """One start after the other, until all is judged."""
        while True:
            decided = sentence(starts, self._policies, self._on_error, most=self._most_starts)
            if decided.ended_by:
                self._end(decided.ended_by, starts[decided.ended_by].count)
                return
            for policy in decided.suspects:
                if await self._count(record, starts, policy, 1) is None:
                    return
            try:
                outcome = await self._in_executor(decided)
            except asyncio.CancelledError:  # the run ends, or goes to another worker, with nobody at fault
                with suppress(TimeoutError):
                    async with asyncio.timeout(UNCOUNT_S):
                        await self._uncount(record, starts, decided.suspects)
                raise
            if outcome is None:
                await self._uncount(record, starts, decided.suspects)
                return
            fault = outcome if isinstance(outcome, Fault) else None
            await self._uncount(record, starts, [p for p in decided.suspects if not fault or p != fault.policy])
            if fault:
                by = 0 if fault.policy in decided.suspects else 1
                counted = await self._count(record, starts, fault.policy, by, failed_at=fault.place)
                if counted is None:
                    return
                why, count = WORDS[fault.end], counted.count
                log.warning("policy_start_failed", run=self.run, policy=fault.policy, problem=why, starts=count)

    async def _count(
        self,
        record: RunRecord,
        starts: dict[str, Starts],
        policy: str,
        by: int,
        *,
        failed_at: int | None = None,
    ) -> Starts | None:
        if counted := await record.count(policy, by, failed_at=failed_at):
            starts[policy] = counted
        return counted

    async def _uncount(self, record: RunRecord, starts: dict[str, Starts], policies: Sequence[str]) -> None:
        for policy in policies:
            await self._count(record, starts, policy, -1)

    async def _in_executor(self, decided: Sentence) -> Fault | bool | None:
        """Judge the run from its first draft on. None: to its end; a fault, or False: the executor was lost."""
        if self._suspect or decided.suspects or self._executors.may_block(self._policies):
            executor = await self._executors.separate(self.waits, each_s=self._reassure_s)
        else:
            executor = await self._executors.shared()
        self._start += 1
        self._steps.clear()  # the blocks of the last start have other numbers, and all is told again
        self._outcome = asyncio.get_running_loop().create_future()
        task = executor.open(self.run, self._policies, decided.failing, self)
        executor.feed(task, self.frames)
        self._fed = lambda frames: executor.feed(task, frames)
        try:
            return await self._outcome
        finally:
            self._fed = None
            executor.close(task)

    def _end(self, policy: str, starts: int) -> None:
        why = f"PolicyStopped: {reason(starts)}"
        decision = Decision(policy, "error", why)
        self._steps.append(PolicyVerdict(WHOLE_RUN, decisions=[decision], ends=f"{policy}: failed: {why}"))
        self._to_tell.set()

    async def _telling(self, record: RunRecord, judging: asyncio.Task[None]) -> None:
        """Tell what is known, until all is judged; what becomes known meanwhile goes together next."""
        while self._steps or not judging.done():
            if not self._steps and not self._reassuring:
                self._to_tell.clear()
                await self._to_tell.wait()
                continue
            self._reassuring = False
            steps = [self._steps.popleft() for _ in range(min(len(self._steps), STEPS_A_RULING))]
            if not await record.tell(max(self._start, 0), steps):
                return
