"""The executor processes of a policy worker, and what happens to one that stalls.

A few are shared by all runs. A run that may end its executor gets one of its own: its policy has ended one before, or
may have. For a while all runs of such a policy are kept apart from other policies' runs: in executors of their own
while there are places, and in restricted ones, which they share with each other. If a shared executor stalls in a call,
it is left to that call's run, and all other runs start again in another one. If the call does not return within its
timeout, the process is killed. So a bad policy only delays other runs for a moment, and a bad run its policy's other
runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from tokenbus.bus.liveness import Defects, Liveness, beat, rest, stop_task
from tokenbus_services.policy_stage.blame import End, Fault, culprit, is_evidence
from tokenbus_services.policy_stage.executor.client import ExecutorProcess, Serves
from tokenbus_services.policy_stage.executor.forking import ExecutorForks
from tokenbus_services.policy_stage.executor.interface import Executor
from tokenbus_services.policy_stage.executor.marks import MarkedCall
from tokenbus_services.policy_stage.executor.messages import Overran, Setup
from tokenbus_services.policy_stage.executor.watchdog import examine

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

CHECK_S = 0.1
MAX_SEPARATE = 4
"""Maximum executors for single runs."""
SEPARATE_S = 60.0
"""How long all runs of a policy that ended or blocked an executor are kept apart from others."""
MAX_WAIT_S = 60.0
"""How long a run's policy timeout is kept from expiring while the run waits for an executor of its own."""
CLOSE_S = 4.0
FORK_PAUSE_S = 0.5
FORK = "fork of an executor"


class NoExecutor(Exception):
    """No executor can be started on this host."""


class ExecutorPool:
    """See `Executors`."""

    def __init__(self, setup: Setup, *, most: int, on_end: Callable[[End], None]) -> None:
        """``most``: number of shared executors. ``on_end``: called for each that ended unexpectedly."""
        self._setup = setup
        self._names = list(setup.policies)
        self._timeouts = [policy.timeout_s for policy in setup.policies.values()]
        self._most = most
        self._on_end = on_end
        self._forks = ExecutorForks(setup, make=self._make, on_forked=self._forked, on_server_lost=self._server_lost)
        self._restricting = asyncio.Lock()
        self._processes: set[ExecutorProcess] = set()
        self._separate = asyncio.Semaphore(MAX_SEPARATE)
        self._changed = asyncio.Event()
        """Set when there is another shared executor."""
        self._blocks_until: dict[str, float] = {}
        """By policy that ended or blocked an executor."""
        self._tasks = 0
        self._watching: asyncio.Task[None] | None = None
        self._failed_work: Callable[[str], object] = lambda work: None
        self._closed = False

    @property
    def count(self) -> int:
        return len(self._processes)

    @property
    def waiting_calls(self) -> int:
        return sum(each.page.read().waiting_calls for each in self._processes)

    async def start(self, liveness: Liveness) -> None:
        """See `Executors.start`. Also raises OSError."""
        self._failed_work = liveness.failed_work
        await self._forks.open()
        for _ in range(self._most):
            await self._forks.fork("all")
        self._watching = liveness.start(self._watch(), name="executors")

    async def stop(self) -> None:
        self._closed = True
        self._forks.keep_server()
        await stop_task(self._watching)
        running = [*self._processes]
        for each in running:
            each.half_close()
        if running:
            await asyncio.wait([each.gone for each in running], timeout=CLOSE_S)
        await self._forks.close()
        for each in running:
            each.cut_off()
        if running:
            await asyncio.wait([each.gone for each in running])

    def may_block(self, policies: tuple[str, ...]) -> bool:
        now = time.monotonic()
        return any(self._blocks_until.get(policy, 0.0) > now for policy in policies)

    async def shared(self) -> Executor:
        """Return the one with the fewest runs; wait if there is none."""
        while not (shared := self._shared):
            self._changed.clear()
            await self._changed.wait()
        return min(shared, key=lambda each: len(each.runs))

    async def restricted(self) -> Executor:
        if not self._separate.locked():
            await self._separate.acquire()
            return await self._in_place()
        async with self._restricting:
            there = [each for each in self._processes if each.serves == "restricted" and not each.emptied]
            if len(there) < self._most:
                return await self._fork_until_done("restricted")
        return min(there, key=lambda each: len(each.runs))

    async def separate(self, waits: Callable[[], None], *, each_s: float) -> Executor:
        acquiring = asyncio.create_task(self._separate.acquire())
        began = time.monotonic()
        try:
            while not (await asyncio.wait({acquiring}, timeout=each_s))[0]:
                if time.monotonic() - began < MAX_WAIT_S:
                    waits()
        except BaseException:
            if acquiring.done():
                self._separate.release()
            acquiring.cancel()
            raise
        return await self._in_place()

    async def _in_place(self) -> ExecutorProcess:
        """Fork an executor for a single run, in the place that was acquired for it."""
        try:
            return await self._fork_until_done("one")
        except BaseException:
            self._separate.release()
            raise

    async def _fork_until_done(self, serves: Serves) -> ExecutorProcess:
        while True:
            try:
                return await self._forks.fork(serves)
            except OSError as e:  # the run's policy timeout ends it, and so this; `_watch` ends the worker
                log.warning("policy_executor_not_started", problem=str(e))
                self._failed_work(FORK)
                await asyncio.sleep(FORK_PAUSE_S)

    @property
    def _shared(self) -> list[ExecutorProcess]:
        return [each for each in self._processes if each.serves == "all"]

    def _make(self, serves: Serves) -> ExecutorProcess:
        return ExecutorProcess(serves=serves, next_task=self._next_task, on_end=self._ended, on_overrun=self._overran)

    def _next_task(self) -> int:
        self._tasks += 1
        return self._tasks

    def _forked(self, process: ExecutorProcess) -> None:
        self._processes.add(process)
        if process.serves == "all":
            self._changed.set()

    def _server_lost(self) -> None:
        for each in self._processes:
            each.killed_with_all = True

    # --- what becomes of them -------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        defects, before = Defects(), time.monotonic()
        while True:
            await rest(CHECK_S)
            now = time.monotonic()
            # Cap the step: a worker that was stopped or had no CPU did not see whether its executors progressed.
            passed_s, before = min(now - before, 2 * CHECK_S), now
            try:
                for process in [*self._processes]:
                    self._look_at(process, passed_s)
                while len(self._shared) < self._most:
                    beat()
                    await self._forks.fork("all")
                defects.none()
            except Exception as e:
                log.warning("policy_executors_failed", problem=f"{type(e).__name__}: {e}")
                self._failed_work(FORK)
                # An OSError here is this host's, not the bus's server's: another worker may be able to fork.
                defects.count(NoExecutor(str(e)) if isinstance(e, OSError) else e)
                await rest(FORK_PAUSE_S)

    def _look_at(self, process: ExecutorProcess, passed_s: float) -> None:
        found = examine(process, passed_s, timeouts_s=self._timeouts, memory_bytes=self._setup.memory_bytes)
        if found == "gone":
            process.cut_off()
        elif isinstance(found, MarkedCall):
            self._leave_to(process, found)
        elif found:
            self._kill(process, found)

    def _kill(self, process: ExecutorProcess, end: End) -> None:
        process.killed_for = process.killed_for or end
        self._forks.kill(process)

    def _leave_to(self, process: ExecutorProcess, call: MarkedCall) -> None:
        """Leave the executor to that call's run, and let it end with that run; all other runs start again elsewhere."""
        policy = self._names[call.policy]
        log.warning("policy_blocking", policy=policy, pid=process.pid, runs=len(process.runs))
        self._note(policy)
        process.serves = "one"
        others = {task: run for task, run in process.runs.items() if task != call.task}
        for task, run in others.items():
            process.close(task)
            run.on_lost(None, suspect=False)
        if not process.runs:  # the run has ended meanwhile, but its call is still running
            self._kill(process, "blocked")

    def _overran(self, process: ExecutorProcess, message: Overran) -> None:
        process.overran = message
        self._kill(process, "overran")

    def _ended(self, process: ExecutorProcess) -> None:
        """Handle an executor that has ended or must not be used again."""
        self._processes.discard(process)
        if process.takes_place:
            self._separate.release()
        runs, process.runs = process.runs, {}
        marks = process.page.read()
        process.page.close()
        self._forks.kill(process)  # it may only have closed its connection
        if self._closed or (process.emptied and not runs):
            return
        if process.killed_with_all:
            for run in runs.values():
                run.on_lost(None, suspect=False)
            return
        end: End = "memory" if marks.out_of_memory else process.killed_for or "exited"
        # One that was shared and is left to a run may still have threads and memory of the others.
        alone = process.takes_place and len(runs) == 1
        if (over := process.overran) and end == "overran":
            call = MarkedCall(over.task, self._names.index(over.policy), over.place)
        else:
            call = culprit(marks, end, memory_bytes=self._setup.memory_bytes, alone=alone)
        policy = self._names[call.policy] if call else process.only_policy if alone else None
        evidence = is_evidence(end, alone=alone)
        log.warning("policy_executor_ended", how=end, policy=policy, pid=process.pid, runs=len(runs), evidence=evidence)
        self._on_end(end)
        if policy and (evidence or end == "stalled"):
            self._note(policy)
        for task, run in runs.items():
            suspect = call is None or call.task == task
            fault = Fault(policy, call.place if call else 0, end) if suspect and evidence and (alone or call) else None
            run.on_lost(fault, suspect=suspect)

    def _note(self, policy: str) -> None:
        self._blocks_until[policy] = time.monotonic() + SEPARATE_S
