"""The executors of a policy worker, and which of them judges which run.

There are two ways: an executor is shared by runs, or has a single one. A run that may end its executor gets one of its
own: it has ended one before, or may have. If a shared executor stalls in a call, it is killed, and its runs start
again: that call's run in an executor of its own, the others together. For a while all runs of a policy that ended or
stalled one are kept apart from other policies' runs: in executors of their own while there are places, else in shared
ones with each other. So a bad policy only delays other runs for a moment, and a bad run its policy's other runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec
import structlog

from tokenbus.bus import process_clock
from tokenbus.bus.liveness import Liveness
from tokenbus_services.executor.marks import ExecutorMarks, MarkedCall
from tokenbus_services.executor.processes import End, ExecutorProcess, Executors
from tokenbus_services.executor.protocol import Setup
from tokenbus_services.policy_stage import messages
from tokenbus_services.policy_stage.calls import PolicyExecutor, load_policies
from tokenbus_services.policy_stage.messages import MESSAGE_BYTES, FromExecutor, PolicyWork

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

MODULE = "tokenbus_services.policy_stage.calls"
STALLED_S = 1.0
"""A shared executor stuck in one step of a call for this long holds up its other runs."""
SILENT_S = 10.0
"""An executor whose event loop has not turned for this long, without a call in progress, counts as dead."""
MAX_SEPARATE = 4
"""Maximum executors for single runs."""
APART_S = 60.0
"""How long all runs of a policy that ended or stalled an executor are kept apart from others."""
MAX_WAIT_S = 60.0
"""How long a run's policy timeout is suspended while the run waits for an executor of its own."""
FORK_PAUSE_S = 0.5


class RunInExecutor(Protocol):
    """Callbacks for a run in its executor. None is called after `finished` or `lost`."""

    def on_verdicts(self, message: messages.Verdicts) -> None:
        """Its policies returned verdicts."""
        ...

    def on_waiting(self) -> None:
        """It is waiting for a slot."""
        ...

    def on_finished(self) -> None:
        """All of it has been judged."""
        ...

    def on_lost(self, fault: Fault | None, *, suspect: bool) -> None:
        """The executor is gone, and the run must start again. ``fault``: it counts against this run.
        ``suspect``: it may have been this run's fault.
        """
        ...


class Executor(Protocol):
    """One executor, as seen by its worker."""

    @property
    def single(self) -> bool:
        """Whether it never has more than one run."""
        ...

    def open(
        self, run: str, policies: tuple[str, ...], failing: Mapping[str, messages.Failing], to: RunInExecutor
    ) -> int:
        """Start judging a run; return its task number."""
        ...

    def feed(self, task: int, frames: list[bytes]) -> None:
        """Pass on further drafts."""
        ...

    def close(self, task: int) -> None:
        """Stop judging: the run needs no more verdicts. Ends an executor with a single run."""
        ...


class PolicyExecutors(Protocol):
    @property
    def count(self) -> int:
        """Number of running processes."""
        ...

    @property
    def waiting_calls(self) -> int:
        """Number of policy calls waiting for a slot."""
        ...

    async def start(self, liveness: Liveness) -> None:
        """Start. Raises SettingsError if a policy cannot be loaded; OSError."""
        ...

    async def stop(self) -> None:
        """Stop all running work."""
        ...

    async def take(
        self, policies: tuple[str, ...], waits: Callable[[], None], *, alone: bool, each_s: float
    ) -> Executor:
        """Return an executor for a run of these policies. ``alone``: for this run only; ``waits`` is then called every
        ``each_s`` until there is one, for `MAX_WAIT_S`.
        """
        ...


class InWorker:
    """The worker's process as the only executor: a policy that blocks or ends it costs the worker its leases."""

    single = False
    count = 0

    def __init__(self, work: PolicyWork) -> None:
        """Import the policies. Raises SettingsError if one cannot be loaded or its options are invalid."""
        self._runs: dict[int, RunInExecutor] = {}
        self._tasks = 0
        self._executor = PolicyExecutor(load_policies(work.policies), work, send=self._on_message)

    @property
    def waiting_calls(self) -> int:
        return self._executor.waiting

    async def start(self, liveness: Liveness) -> None:
        pass

    async def stop(self) -> None:
        await self._executor.close()

    async def take(
        self, policies: tuple[str, ...], waits: Callable[[], None], *, alone: bool, each_s: float
    ) -> Executor:
        return self

    def open(
        self, run: str, policies: tuple[str, ...], failing: Mapping[str, messages.Failing], to: RunInExecutor
    ) -> int:
        self._tasks += 1
        self._runs[self._tasks] = to
        self._executor.handle(messages.Open(self._tasks, run, policies, dict(failing)))
        return self._tasks

    def feed(self, task: int, frames: list[bytes]) -> None:
        self._executor.handle(messages.Feed(task, frames))

    def close(self, task: int) -> None:
        if self._runs.pop(task, None):
            self._executor.handle(messages.Close(task))

    def _on_message(self, message: FromExecutor) -> None:
        _deliver(message, self._runs)


class PolicyProcess(ExecutorProcess):
    def __init__(self, pool: PolicyPool, *, single: bool, apart: bool) -> None:
        """``apart``: for policies that ended or stalled an executor recently."""
        super().__init__(message_bytes=MESSAGE_BYTES)
        self._pool = pool
        self.single = single
        self.apart = apart
        self.takes_place = False
        """Whether it counts among the executors for single runs."""
        self.runs: dict[int, RunInExecutor] = {}
        """By task."""
        self.only_policy: str | None = None
        """The policy of its last run, if this has a single one."""
        self.overran: MarkedCall | None = None
        self._step, self._still_s = 0, 0.0
        """The step in progress at the last look, and how long it has lasted."""
        self._beats, self._silent_s = 0, 0.0
        """The same for its event loop, while it has work to do."""

    def open(
        self, run: str, policies: tuple[str, ...], failing: Mapping[str, messages.Failing], to: RunInExecutor
    ) -> int:
        task = self._pool.next_task()
        self.runs[task] = to
        self.only_policy = policies[0] if len(policies) == 1 else None
        self.name = " ".join(policies) if self.single else ""
        self.send(messages.Open(task, run, policies, dict(failing)))
        if self.gone.done():  # it ended before its first run came; its end was reported already
            asyncio.get_running_loop().call_soon(lambda: to.on_lost(None, suspect=False))
        return task

    def feed(self, task: int, frames: list[bytes]) -> None:
        self.send(messages.Feed(task, frames))

    def close(self, task: int) -> None:
        if self.runs.pop(task, None):
            self.send(messages.Close(task))
            self._retire_if_empty()

    def _retire_if_empty(self) -> None:
        if not self.runs and (self.single or self.apart):
            self.retire()

    def on_message(self, body: bytes) -> None:
        message = messages.from_executor.decode(body)
        if isinstance(message, messages.Overran):
            self.overran = MarkedCall(message.task, self._pool.names.index(message.policy), message.place)
            self._pool.kill(self, "overran")
        elif _deliver(message, self.runs):
            self._retire_if_empty()

    def check(self, passed_s: float) -> End | None:
        marks = self.page.read()
        if marks.call and marks.step == self._step:
            self._still_s += passed_s
            if self._still_s > (STALLED_S if not self.single else self._pool.timeouts[marks.call.policy]):
                return "blocked" if self.single else "stalled"
        else:
            self._step, self._still_s = marks.step, 0.0
        if marks.call or marks.beats != self._beats or not (self.runs or self.retired):
            self._beats, self._silent_s = marks.beats, 0.0
        else:
            self._silent_s += passed_s
        return "blocked" if self._silent_s > SILENT_S else None

    def on_end(self, end: End | None, marks: ExecutorMarks) -> None:
        self._pool.ended(self, end, marks)


class PolicyPool:
    def __init__(self, work: PolicyWork, setup: Setup, *, most: int, on_end: Callable[[End], None]) -> None:
        """``most``: number of shared executors. ``on_end``: called for each that ended unexpectedly."""
        self.names = list(work.policies)
        self.timeouts = [policy.timeout_s for policy in work.policies.values()]
        self._memory_bytes = setup.memory_bytes
        self._most = most
        self._on_end = on_end
        self._executors = Executors(MODULE, setup)
        self._sharing = asyncio.Lock()
        self._separate = asyncio.Semaphore(MAX_SEPARATE)
        self._apart_until: dict[str, float] = {}
        """By policy that ended or stalled an executor."""
        self._tasks = 0

    @property
    def processes(self) -> set[PolicyProcess]:
        return {each for each in self._executors.processes if isinstance(each, PolicyProcess)}

    @property
    def count(self) -> int:
        return len(self.processes)

    @property
    def waiting_calls(self) -> int:
        return sum(each.page.read().waiting_calls for each in self.processes)

    def next_task(self) -> int:
        self._tasks += 1
        return self._tasks

    def kill(self, process: PolicyProcess, end: End) -> None:
        self._executors.kill(process, end)

    async def start(self, liveness: Liveness) -> None:
        await self._executors.start(liveness)
        for _ in range(self._most):
            await self._executors.fork(PolicyProcess(self, single=False, apart=False))

    async def stop(self) -> None:
        await self._executors.stop()

    def is_apart(self, policies: tuple[str, ...]) -> bool:
        now = time.monotonic()
        return any(self._apart_until.get(policy, 0.0) > now for policy in policies)

    async def take(
        self, policies: tuple[str, ...], waits: Callable[[], None], *, alone: bool, each_s: float
    ) -> PolicyProcess:
        apart = self.is_apart(policies)
        if not alone and not (apart and not self._separate.locked()):
            return await self._shared(apart=apart)
        await self._place(waits, each_s=each_s)
        try:
            process = await self._fork(single=True, apart=apart)
        except BaseException:
            self._separate.release()
            raise
        if process.gone.done():
            self._separate.release()
        else:
            process.takes_place = True
        return process

    async def _shared(self, *, apart: bool) -> PolicyProcess:
        async with self._sharing:
            there = [each for each in self.processes if not each.single and each.apart == apart and not each.retired]
            if len(there) < self._most:
                return await self._fork(single=False, apart=apart)
        return min(there, key=lambda each: len(each.runs))

    async def _place(self, waits: Callable[[], None], *, each_s: float) -> None:
        acquiring = asyncio.create_task(self._separate.acquire())
        began = process_clock.now()
        try:
            while not (await asyncio.wait({acquiring}, timeout=each_s))[0]:
                if process_clock.now() - began < MAX_WAIT_S:
                    waits()
        except BaseException:
            if acquiring.done():
                self._separate.release()
            acquiring.cancel()
            raise

    async def _fork(self, *, single: bool, apart: bool) -> PolicyProcess:
        while True:
            try:
                return await self._executors.fork(PolicyProcess(self, single=single, apart=apart))
            except OSError:  # the run's policy timeout ends it, and so this; too many in a row end the worker
                await asyncio.sleep(FORK_PAUSE_S)

    def ended(self, process: PolicyProcess, end: End | None, marks: ExecutorMarks) -> None:
        """Handle an executor that has ended or must not be used again."""
        runs, process.runs = process.runs, {}
        if process.takes_place:
            self._separate.release()
        if end is None:
            for run in runs.values():
                run.on_lost(None, suspect=False)
            return
        alone = process.single and len(runs) == 1
        call = culprit(marks, end, memory_bytes=self._memory_bytes, alone=alone)
        if end == "overran":
            call = process.overran
        policy = self.names[call.policy] if call else process.only_policy if alone else None
        evidence = is_evidence(end, alone=alone)
        log.warning("policy_executor_ended", how=end, policy=policy, pid=process.pid, runs=len(runs), evidence=evidence)
        self._on_end(end)
        if policy and (evidence or end == "stalled"):
            self._apart_until[policy] = time.monotonic() + APART_S
        for task, run in runs.items():
            suspect = call is None or call.task == task
            fault = Fault(policy, call.place if call else 0, end) if suspect and evidence and (alone or call) else None
            run.on_lost(fault, suspect=suspect)


def _deliver(message: FromExecutor, runs: dict[int, RunInExecutor]) -> bool:
    """Pass an executor's message on to its run; return whether it is the run's last one."""
    if (run := runs.get(message.task)) is None:
        return False
    match message:
        case messages.Verdicts():
            run.on_verdicts(message)
        case messages.WaitingForSlot():
            run.on_waiting()
        case messages.Finished():
            run.on_finished()
        case messages.Defect():
            # Not caused by a policy: its errors are handled in the stream. The parser's policy timeout ends the run.
            log.error("policy_run_failed", problem=message.problem)
            run.on_finished()
        case messages.Overran():
            pass
    if isinstance(message, messages.Finished | messages.Defect):
        del runs[message.task]
        return True
    return False


# Decides which run is at fault for an executor that ended. Pure. What follows from it: failed_starts.py.
#
# A start counts against a policy of a run only by evidence: its executor ended while the run was alone in it, or its
# call did not return. The end of a shared executor, or of a worker, is not evidence: such a run is isolated in an
# executor of its own, where the next end counts.

END_TEXTS: Mapping[End, str] = {
    "blocked": "a call blocked its process",
    "stalled": "a call held up other runs",
    "exited": "its process died",
    "memory": "its process took too much memory",
    "overran": "a call continued past its timeout",
}


class Fault(msgspec.Struct, frozen=True):
    """The end of an executor that counts against the run in it."""

    policy: str | None
    """None: one of the run's policies; which one is unknown."""
    place: int
    """The call's place (`marks.place_of`)."""
    end: End


def culprit(marks: ExecutorMarks, end: End, *, memory_bytes: int, alone: bool) -> MarkedCall | None:
    """Return the call that is probably at fault; None if that is unknown. ``alone``: the executor had one run ever.

    For memory, that is the call whose steps used most of it, not the one whose allocation failed.
    """
    over = end == "memory" or marks.out_of_memory
    if over and marks.grew and marks.grew_bytes >= memory_bytes // 2:
        return marks.grew
    if marks.call and (not over or marks.out_of_memory):
        return marks.call
    return (marks.grew if over else None) or marks.call if alone else None


def is_evidence(end: End, *, alone: bool) -> bool:
    """Whether this end counts against its culprit: in a shared executor, another run may have caused it. ``alone``: as
    for `culprit`.
    """
    return alone or end in ("blocked", "overran")
