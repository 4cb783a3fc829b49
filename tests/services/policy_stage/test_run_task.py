"""A run in its worker: what is written down of its starts, so that no innocent policy is taken for a harmful one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from tests.waiting import eventually
from tokenbus.bus.scripts.policies import Place
from tokenbus.events.frames import PolicyVerdict
from tokenbus_services.policy_stage.executors import Fault, RunInExecutor
from tokenbus_services.policy_stage.failed_starts import WORKERS_IN_SHARED, RunStarts, Starts
from tokenbus_services.policy_stage.messages import Failing, Verdicts
from tokenbus_services.policy_stage.run_task import PolicyRunTask

POLICIES, MOST = ("p",), 3


class Record:
    """The run's hash, which outlives its workers."""

    def __init__(self) -> None:
        self.fails: Exception | None = None
        self.kept = RunStarts()
        self.place: Place | None = None
        self.sent: list[PolicyVerdict] = []

    async def starts(self) -> RunStarts | None:
        self.kept.lost_in_shared += self.place == "beside"
        self.kept.lost_in_own += self.place == "alone"
        self.place = "beside"
        return RunStarts(
            dict(self.kept.policies), self.kept.lost_in_shared, self.kept.lost_in_own, self.kept.unexplained
        )

    async def note_place(self, place: Place) -> bool:
        self.place = place
        return True

    async def note_unexplained(self, ends: int) -> bool:
        self.kept.unexplained = ends
        return True

    async def count(self, policy: str, starts: int, *, failed_at: int | None = None) -> Starts | None:
        self.kept.policies[policy] = Starts(starts, failed_at or 0)
        return self.kept.policies[policy]

    async def append_verdicts(self, start: int, first: int, steps: list[PolicyVerdict]) -> bool:
        if self.fails:
            raise self.fails
        self.sent += steps
        return True


class Pool:
    """Executors that only report the place of the run."""

    count = waiting_calls = 0

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.run: RunInExecutor | None = None

    async def start(self, liveness: object) -> None: ...

    async def stop(self) -> None: ...

    @property
    def single(self) -> bool:
        return self.places[-1] == "alone"

    async def take(self, policies: tuple[str, ...], waits: Callable[[], None], *, alone: bool, each_s: float) -> Pool:
        self.places.append("alone" if alone else "beside")
        return self

    def open(self, run: str, policies: tuple[str, ...], failing: Mapping[str, Failing], to: RunInExecutor) -> int:
        self.run = to
        return 1

    def feed(self, task: int, frames: list[bytes]) -> None: ...

    def close(self, task: int) -> None:
        self.run = None

    async def lose(self, fault: Fault | None, *, suspect: bool) -> None:
        """End the executor, and wait for the next one."""
        await eventually(lambda: self.run is not None)
        assert self.run
        starts = len(self.places)
        self.run.on_lost(fault, suspect=suspect)
        await eventually(lambda: len(self.places) > starts and self.run is not None)


class Worker:
    """One worker with the run, until it is killed."""

    def __init__(self, record: Record) -> None:
        async def found() -> Record:
            return record

        self.pool = Pool()
        self.waiting = 0
        self.task = PolicyRunTask(
            "r",
            POLICIES,
            record=found,
            executors=self.pool,
            on_error={"p": "block"},
            most_starts=MOST,
            report_waiting_s=30.0,
            waiting=self._wait,
        )
        self.task.start()

    def _wait(self, more: int) -> None:
        self.waiting += more

    async def kill(self) -> None:
        self.task.close()
        await self.task.closed()


async def test_an_innocent_policy_outlives_anothers_memory_and_workers_that_are_killed():
    record = Record()
    worker = Worker(record)
    await worker.pool.lose(None, suspect=True)  # another run took the memory that its call asked for
    assert worker.pool.places == ["beside", "alone"]
    await eventually(lambda: record.place == "alone")
    await worker.kill()
    for _ in range(MOST):
        worker = Worker(record)
        await eventually(lambda: worker.pool.run is not None)  # noqa: B023 - awaited here
        await worker.kill()
    assert record.kept.policies == {}
    assert not record.sent


async def test_a_run_whose_workers_were_lost_again_and_again_is_isolated_and_at_last_ended():
    record = Record()
    places: list[Place] = []
    while not record.sent:
        worker = Worker(record)
        await eventually(lambda: worker.pool.run is not None or bool(record.sent))  # noqa: B023 - awaited here
        if worker.pool.places[-1:] == ["alone"]:
            await eventually(lambda: record.place == "alone")
        places += worker.pool.places
        await worker.kill()
    assert places == ["beside"] * WORKERS_IN_SHARED + ["alone"] * (3 * MOST)
    assert record.sent[0].ends
    assert "9 workers were lost with it" in record.sent[0].ends


async def test_only_what_counts_is_written_and_the_last_failed_start_ends_the_run():
    record = Record()
    worker = Worker(record)
    await worker.pool.lose(None, suspect=False)
    await worker.pool.lose(Fault("p", 4, "exited"), suspect=True)
    assert worker.pool.places == ["beside", "beside", "alone"]
    await worker.pool.lose(Fault("p", 6, "exited"), suspect=True)
    assert record.kept.policies == {"p": Starts(2, 6)}
    assert worker.pool.run
    worker.pool.run.on_lost(Fault("p", 6, "exited"), suspect=True)
    await eventually(lambda: bool(record.sent))
    assert record.sent[0].ends
    assert "in each of 3 starts" in record.sent[0].ends
    await asyncio.sleep(0)
    await worker.kill()


async def test_drafts_of_a_run_that_is_judged_no_further_do_not_count_as_waiting():
    """Enough of them would stop the worker's reading, and so it would never read the frame that ends the run."""
    record = Record()
    worker = Worker(record)
    await eventually(lambda: worker.pool.run is not None)
    worker.task.add(b"frame", 3)
    assert worker.waiting == 3
    record.fails = RuntimeError("nobody thought of this")
    assert worker.pool.run
    worker.pool.run.on_verdicts(Verdicts(1, 1, [PolicyVerdict(0)]))
    await worker.task.closed()
    assert worker.waiting == 0
    worker.task.add(b"frame", 2)
    assert worker.waiting == 0
    await worker.kill()
    assert worker.waiting == 0
