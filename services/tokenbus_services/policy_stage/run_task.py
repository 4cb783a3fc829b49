"""One run under its policies, in the worker: sends drafts to an executor and verdicts to the parser.

An executor may end at any time, by this run's fault or another's. Then the run starts again in another one with all its
drafts; repeated verdicts are ignored (`tokenbus.core.run.gated_run`). A policy that ends its executors too often is no
longer called (`failed_starts`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import structlog

from tokenbus.bus import scripts
from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts.policies import Place, count_policy_start, note_place, note_unexplained, policy_starts
from tokenbus.bus.server.retry import retry_until_available
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus.events.frames import (
    CONTROL_ATTEMPT,
    WHOLE_RUN,
    EventFrame,
    PolicyVerdict,
    PolicyVerdicts,
    RecordedDecision,
    encode,
)
from tokenbus.policy.policy_runner import OnError
from tokenbus_services.policy_stage.executors import Fault, PolicyExecutors
from tokenbus_services.policy_stage.failed_starts import (
    RunStarts,
    StartCounts,
    StartDecision,
    Starts,
    count_failed_start,
    decide_start,
)
from tokenbus_services.policy_stage.messages import Verdicts

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

VERDICTS_PER_MESSAGE = 200
"""Maximum verdicts per message."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0
"""Before the second start again of a run, and the longest one, which each doubles towards."""


class RunRecord(StartCounts, Protocol):
    """The run on the server, while this worker owns its partition."""

    async def starts(self) -> RunStarts | None:
        """Return its recorded starts, and write down that this worker judges it, together with others. None: the run
        is over or another worker owns it.
        """
        ...

    async def note_place(self, place: Place) -> bool:
        """Write down where this worker judges it now; False: as None for `starts`."""
        ...

    async def append_verdicts(self, start: int, first: int, steps: list[PolicyVerdict]) -> bool:
        """Send verdicts; return False if they are no longer needed. ``start``: number of the start; each one
        renumbers blocks. ``first``: how many steps of this start were sent before.
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
        executors: PolicyExecutors,
        on_error: Mapping[str, OnError],
        most_starts: int,
        report_waiting_s: float,
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
        self._report_waiting_s = report_waiting_s
        self._waiting = waiting
        self._drafts = self._seen = 0
        """Drafts received, and drafts that policies have seen."""
        self._start = -1
        self._fed: Callable[[list[bytes]], None] | None = None
        """Sends more drafts to its executor."""
        self._reports_waiting = False
        """Whether the run is waiting for a slot, which the parser must know."""
        self._steps: deque[PolicyVerdict] = deque()
        self._sent = 0
        """Steps sent since this start."""
        self._wake = asyncio.Event()
        self._outcome: asyncio.Future[Fault | bool | None]
        self._may_end_executor = False
        self._place: Place = "beside"
        self._task: asyncio.Task[None] | None = None
        self._over = False
        """Whether its policies see no further drafts."""

    def add(self, frame: bytes, drafts: int) -> None:
        self.frames.append(frame)
        if self._over:
            return
        self._drafts += drafts
        self._waiting(drafts)
        if self._fed:
            self._fed([frame])

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._work(), name=f"policies of {self.run}")

    def close(self) -> None:
        """Stop: the run needs no more verdicts."""
        self._end_waiting()
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
        self._reports_waiting = True
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
            log.exception("policy_run_failed", run=self.run)
        finally:
            self._over = True
            self._end_waiting()

    def _end_waiting(self) -> None:
        """Count no draft as waiting: enough of them stop the worker's reading, also of the frame that ends the run."""
        self._waiting(self._seen - self._drafts)
        self._seen = self._drafts

    async def _judge(self, record: RunRecord, starts: RunStarts) -> None:
        """Start the run, again and again until all is judged."""
        while True:
            decided = decide_start(starts, self._policies, self._on_error, most=self._max_starts)
            if decided.ended_by:
                self._end(decided.ended_by, decided.why)
                return
            outcome = await self._in_executor(record, decided)
            if outcome is None:
                return
            if isinstance(outcome, Fault) and not await count_failed_start(self.run, starts, outcome, record):
                return
            if self._start:
                # If executors end as fast as they start, without a policy at fault, the parser's policy timeout ends
                # the run.
                await asyncio.sleep(min(_FIRST_PAUSE_S * 2 ** min(self._start, 10), _LONGEST_PAUSE_S))

    async def _in_executor(self, record: RunRecord, decided: StartDecision) -> Fault | bool | None:
        """Judge the run from its first draft on. Returns None at its end, or if another worker owns it; a fault, or
        False, if the executor was lost.
        """
        if not await self._move(record, "beside"):
            return None
        alone = self._may_end_executor or decided.isolated
        executor = await self._executors.take(
            self._policies, self.on_waiting, alone=alone, each_s=self._report_waiting_s
        )
        self._start += 1
        self._sent = 0
        self._steps.clear()  # the last start's blocks have other numbers, and all verdicts are sent again
        self._outcome = asyncio.get_running_loop().create_future()
        task = executor.open(self.run, self._policies, decided.failing, self)
        try:
            if executor.single and not await self._move(record, "alone"):
                return None
            executor.feed(task, self.frames)
            self._fed = lambda frames: executor.feed(task, frames)
            return await self._outcome
        finally:
            self._fed = None
            executor.close(task)

    async def _move(self, record: RunRecord, to: Place) -> bool:
        """Write down where the run is judged, before it is; False if the run is over or another worker owns it."""
        if to == self._place:
            return True
        self._place = to
        return await record.note_place(to)

    def _end(self, policy: str, why: str) -> None:
        why = f"PolicyStopped: {why}"
        decision = RecordedDecision(policy, "error", why)
        self._steps.append(PolicyVerdict(WHOLE_RUN, decisions=[decision], ends=f"{policy}: failed: {why}"))
        self._wake.set()

    async def _send_verdicts(self, record: RunRecord, judging: asyncio.Task[None]) -> None:
        """Send verdicts until all is judged; verdicts that arrive meanwhile form the next message."""
        while self._steps or not judging.done():
            if not self._steps and not self._reports_waiting:
                self._wake.clear()
                await self._wake.wait()
                continue
            self._reports_waiting = False
            steps = [self._steps.popleft() for _ in range(min(len(self._steps), VERDICTS_PER_MESSAGE))]
            first, self._sent = self._sent, self._sent + len(steps)
            if not await record.append_verdicts(max(self._start, 0), first, steps):
                return


GROUP = "policy"


class ServerRunRecord:
    """See `RunRecord`. Valid as long as the partition's lease has this token."""

    def __init__(
        self,
        server: Server,
        keys: Keys,
        run: str,
        policies: tuple[str, ...],
        *,
        token: str,
        on_decision: Callable[[RecordedDecision], None],
    ) -> None:
        """``on_decision``: called for each decision that was recorded."""
        self._server = server
        self._keys = keys
        self._run = run
        self._policies = policies
        self._token = token
        self._on_decision = on_decision
        self._partition = keys.partition_of(run)
        self._lease = keys.lease(self._partition, GROUP)

    async def starts(self) -> RunStarts | None:
        call = policy_starts(self._keys.run(self._run), self._lease, token=self._token, policies=self._policies)
        reply = await self._run_script(call, "starts of a run's policies")
        if isinstance(reply, bytes):
            return None
        in_shared, in_own, unexplained, *numbers = [int(value or 0) for value in reply]
        pairs = zip(self._policies, numbers[::2], numbers[1::2], strict=True)
        counted = {policy: Starts(count, failed_at) for policy, count, failed_at in pairs}
        return RunStarts(counted, lost_in_shared=in_shared, lost_in_own=in_own, unexplained=unexplained)

    async def note_place(self, place: Place) -> bool:
        call = note_place(self._keys.run(self._run), self._lease, token=self._token, place=place)
        return not isinstance(await self._run_script(call, "place of a run's policies"), bytes)

    async def note_unexplained(self, ends: int) -> bool:
        call = note_unexplained(self._keys.run(self._run), self._lease, token=self._token, ends=ends)
        return not isinstance(await self._run_script(call, "ends of a run's executors"), bytes)

    async def count(self, policy: str, starts: int, *, failed_at: int | None = None) -> Starts | None:
        call = count_policy_start(
            self._keys.run(self._run),
            self._lease,
            token=self._token,
            policy=policy,
            starts=starts,
            failed_at=failed_at or 0,
        )
        reply = await self._run_script(call, "count of a policy's start")
        return None if isinstance(reply, bytes) else Starts(*reply)

    async def append_verdicts(self, start: int, first: int, steps: list[PolicyVerdict]) -> bool:
        server, keys = self._server, self._keys
        worker = f"{self._token} {start}" if start else self._token
        frame = EventFrame(0, CONTROL_ATTEMPT, server.clock.now_ms(), [PolicyVerdicts(worker, steps, first)])
        call = scripts.append_verdicts(
            keys.run(self._run),
            keys.topic(self._partition, "events"),
            keys.lease(self._partition, "parser"),
            self._lease,
            run=self._run,
            token=self._token,
            frame=encode(frame),
        )
        reply = await self._run_script(call, "verdicts")
        if reply != b"ok":
            log.info("verdicts_refused", run=self._run, reply=reply.decode())
            return False
        for step in steps:
            for decision in step.decisions:
                self._on_decision(decision)
                log.info("policy_decided", run=self._run, policy=decision.policy, action=decision.action)
        return True

    async def _run_script(self, call: scripts.ScriptCall, what: str) -> Any:
        return await retry_until_available(self._server, lambda: run_script(self._server, call), what=what)
