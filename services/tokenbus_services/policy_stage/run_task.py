"""One run under its policies, in the worker: sends drafts to an executor and verdicts to the parser.

An executor may end at any time, by this run's fault or another's. Then the run starts again in another one with all its
drafts; repeated verdicts are ignored (`tokenbus.core.run.gated`). A policy that ends its executors too often is no
longer called. The count is in the run's hash, so that other workers continue it.
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
from tokenbus_services.policy_stage.blame import END_TEXTS, Fault, StartDecision, Starts, decide_start, reason
from tokenbus_services.policy_stage.executors import Executors
from tokenbus_services.policy_stage.messages import Verdicts

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

UNCOUNT_S = 1.0
VERDICTS_PER_MESSAGE = 200
"""Maximum verdicts per message."""


class RunRecord(Protocol):
    """The run on the server, while this worker owns its partition."""

    async def starts(self) -> dict[str, Starts] | None:
        """Return the failed starts of its policies; None if the run is over or another worker owns it."""
        ...

    async def count(self, policy: str, starts: int, *, failed_at: int | None = None) -> Starts | None:
        """Set a count and return it. None: as for `starts`."""
        ...

    async def append_verdicts(self, start: int, steps: list[PolicyVerdict]) -> bool:
        """Send verdicts; return False if they are no longer needed. ``start``: number of the start; each one
        renumbers blocks.
        """
        ...


class PolicyRunTask:
    """The task of one run; a slow policy delays only this run. Call `start` once; `close` ends it at any time."""

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
        """``record``: awaited once; returns None if another worker owns the run. ``waiting``: called with changes of
        the number of waiting drafts.
        """
        self.run = run
        self.frames: list[bytes] = []
        """All of the run's drafts."""
        self._policies = policies
        self._get_record = record
        self._executors = executors
        self._on_error = on_error
        self._max_starts = most_starts
        self._reassure_s = reassure_s
        self._waiting = waiting
        self._drafts = self._seen = 0
        """Drafts received, and drafts that policies have seen."""
        self._start = -1
        self._fed: Callable[[list[bytes]], None] | None = None
        """Sends more drafts to its executor."""
        self._reassuring = False
        """Whether the run is waiting for a slot and the parser must be told so."""
        self._steps: deque[PolicyVerdict] = deque()
        self._wake = asyncio.Event()
        self._outcome: asyncio.Future[Fault | bool | None]
        self._may_end_executor = False
        self._task: asyncio.Task[None] | None = None

    def add(self, frame: bytes, drafts: int) -> None:
        """Add the next drafts."""
        self.frames.append(frame)
        self._drafts += drafts
        self._waiting(drafts)
        if self._fed:
            self._fed([frame])

    def start(self) -> None:
        """Start if it has not started."""
        if self._task is None:
            self._task = asyncio.create_task(self._work(), name=f"policies of {self.run}")

    def close(self) -> None:
        """Stop: the run needs no more verdicts."""
        self._waiting(self._seen - self._drafts)
        self._seen = self._drafts
        if self._task:
            self._task.cancel()

    async def closed(self) -> None:
        """Wait until all its work has ended. Call it after `close`."""
        if self._task:
            await asyncio.wait({self._task})

    # --- what its executor says -----------------------------------------------------------------------------------

    def on_verdicts(self, message: Verdicts) -> None:
        if message.seen > self._seen:
            self._waiting(self._seen - message.seen)
            self._seen = message.seen
        self._steps.extend(message.steps)
        self._wake.set()

    def on_waiting(self) -> None:
        self._reassuring = True
        self._wake.set()

    def on_finished(self) -> None:
        self._set_outcome(None)

    def on_lost(self, fault: Fault | None, *, suspect: bool) -> None:
        self._may_end_executor = self._may_end_executor or suspect
        self._set_outcome(fault or False)

    def _set_outcome(self, outcome: Fault | bool | None) -> None:
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
                judging.add_done_callback(lambda _: self._wake.set())
                await self._send_verdicts(record, judging)
                judging.cancel()
        except Exception:
            # Not caused by a policy; the executor handles those errors. The parser's policy timeout ends the run.
            log.exception("judging_failed", run=self.run)

    async def _judge(self, record: RunRecord, starts: dict[str, Starts]) -> None:
        """Start the run, again and again until all is judged."""
        while True:
            decided = decide_start(starts, self._policies, self._on_error, most=self._max_starts)
            if decided.ended_by:
                self._end(decided.ended_by, starts[decided.ended_by].count)
                return
            for policy in decided.suspects:
                if await self._count(record, starts, policy, 1) is None:
                    return
            try:
                outcome = await self._in_executor(decided)
            except asyncio.CancelledError:  # the run ends or moves to another worker; no policy is at fault
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
                why, count = END_TEXTS[fault.end], counted.count
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
        held_against = starts[policy].count if policy in starts else 0
        if counted := await record.count(policy, max(0, held_against + by), failed_at=failed_at):
            starts[policy] = counted
        return counted

    async def _uncount(self, record: RunRecord, starts: dict[str, Starts], policies: Sequence[str]) -> None:
        for policy in policies:
            await self._count(record, starts, policy, -1)

    async def _in_executor(self, decided: StartDecision) -> Fault | bool | None:
        """Judge the run from its first draft on. Returns None at its end; a fault, or False, if the executor was
        lost.
        """
        if self._may_end_executor or decided.suspects or self._executors.may_block(self._policies):
            executor = await self._executors.separate(self.on_waiting, each_s=self._reassure_s)
        else:
            executor = await self._executors.shared()
        self._start += 1
        self._steps.clear()  # the last start's blocks have other numbers, and all verdicts are sent again
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
        self._wake.set()

    async def _send_verdicts(self, record: RunRecord, judging: asyncio.Task[None]) -> None:
        """Send verdicts until all is judged; verdicts that arrive meanwhile form the next message."""
        while self._steps or not judging.done():
            if not self._steps and not self._reassuring:
                self._wake.clear()
                await self._wake.wait()
                continue
            self._reassuring = False
            steps = [self._steps.popleft() for _ in range(min(len(self._steps), VERDICTS_PER_MESSAGE))]
            if not await record.append_verdicts(max(self._start, 0), steps):
                return
