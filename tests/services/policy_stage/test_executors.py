"""Separate executors: each is known by its own process id, also if its requester is cancelled."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from tests.services.policy_stage.harmful import MEMORY_BYTES
from tests.waiting import eventually
from tokenbus.bus.liveness import Liveness
from tokenbus.events.frames import Drafts, encode
from tokenbus.events.public import Chunk, PublicEvent, Started
from tokenbus.policy.loading import PolicySpec
from tokenbus_services.executor import processes
from tokenbus_services.executor.processes import End
from tokenbus_services.executor.protocol import Setup
from tokenbus_services.policy_stage import executors as executors_module
from tokenbus_services.policy_stage.executors import MAX_SEPARATE, Executor, Fault, PolicyPool, PolicyProcess
from tokenbus_services.policy_stage.messages import PolicyWork, Verdicts

HARMFUL = "tests.services.policy_stage.harmful"
WORK = PolicyWork(
    policies={
        "passes": PolicySpec(policy="tokenbus.policy:StreamProcessor", timeout_s=5.0, name="passes"),
        "hoards": PolicySpec(policy=f"{HARMFUL}:Hoards", timeout_s=5.0, name="hoards"),
        "wants": PolicySpec(policy=f"{HARMFUL}:Wants", timeout_s=5.0, name="wants"),
        "sleeps": PolicySpec(policy=f"{HARMFUL}:Sleeps", timeout_s=5.0, name="sleeps"),
        "exits": PolicySpec(policy=f"{HARMFUL}:ExitsLater", timeout_s=5.0, name="exits"),
    },
    calls=4,
    report_waiting_s=1.0,
    redis_url="redis://127.0.0.1:1",
    prefix="t",
    partitions=1,
    run_ttl_ms=1000,
)


def setup(work: PolicyWork) -> Setup:
    return Setup(
        service="policy",
        memory_bytes=MEMORY_BYTES,
        path=sys.path,
        log_level="info",
        secrets=[],
        work=msgspec.msgpack.encode(work),
    )


class Run:
    def __init__(self) -> None:
        self.losses: list[tuple[Fault | None, bool]] = []
        self.seen = 0

    def on_verdicts(self, message: Verdicts) -> None:
        self.seen = message.seen

    def on_waiting(self) -> None: ...

    def on_finished(self) -> None: ...

    def on_lost(self, fault: Fault | None, *, suspect: bool) -> None:
        self.losses.append((fault, suspect))


@asynccontextmanager
async def started(ends: list[End]) -> AsyncGenerator[PolicyPool]:
    pool = PolicyPool(WORK, setup(WORK), most=1, on_end=ends.append)
    await pool.start(Liveness())
    try:
        yield pool
    finally:
        await pool.stop()


def judge(executor: Executor, *policies: str) -> Run:
    """A new run with its first drafts, in this executor."""
    run = Run()
    drafts: list[PublicEvent] = [
        Started(run="r", seq=0, turn=0, attempt=0, provider="p", model="m"),
        Chunk(run="r", seq=1, turn=1, attempt=1, block=0, kind="text", text="a", visible=True, depth=0),
    ]
    executor.feed(executor.open("r", policies, {}, run), [encode(Drafts(policies, drafts))])
    return run


async def take(pool: PolicyPool, *policies: str, alone: bool = False) -> PolicyProcess:
    return await pool.take(policies or ("passes",), lambda: None, alone=alone, each_s=1.0)


async def separate(pool: PolicyPool) -> PolicyProcess:
    return await take(pool, alone=True)


async def test_a_caller_that_stops_waiting_leaves_no_wrong_process_id():
    ends: list[End] = []
    async with started(ends) as pool:
        for steps in range(2 * MAX_SEPARATE):
            waiting = asyncio.create_task(separate(pool))
            for _ in range(1 + steps):
                await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        runs = [Run() for _ in range(MAX_SEPARATE)]
        executors = [await separate(pool) for _ in runs]  # all places are free again
        for executor, run in zip(executors, runs, strict=True):
            executor.open("r", ("passes",), {}, run)
        os.kill(executors[1].pid, signal.SIGKILL)
        await eventually(executors[1].gone.done)
        assert [bool(run.losses) for run in runs] == [False, True, False, False]
        assert ends == ["exited"]
        await eventually(lambda: pool.count == MAX_SEPARATE)  # the others, and the shared one; unused ones have exited


async def test_a_fork_server_that_is_given_up_is_no_runs_fault(monkeypatch: pytest.MonkeyPatch):
    ends: list[End] = []
    async with started(ends) as pool:
        run = Run()
        alone = await separate(pool)
        alone.open("r", ("passes",), {}, run)
        monkeypatch.setattr(processes, "FORK_S", 0.0)
        waiting = asyncio.create_task(separate(pool))
        await eventually(lambda: bool(run.losses))
        monkeypatch.undo()
        await waiting
        assert run.losses == [(None, False)]


@pytest.mark.skipif(sys.platform != "linux", reason="memory is bounded on Linux alone")
async def test_a_policy_that_is_refused_memory_which_another_run_took_is_isolated_and_nothing_counts():
    async with started([]) as pool:
        hoards = judge(await take(pool), "hoards")
        await eventually(lambda: hoards.seen == 2)
        wants = judge(await take(pool), "wants")
        await eventually(lambda: bool(wants.losses))
        assert wants.losses == [(None, True)]
        assert hoards.losses == [(None, False)]
        assert not pool.is_apart(("wants",)), "its other runs stay where they are"
        alone = judge(await separate(pool), "wants")
        await eventually(lambda: alone.seen == 2)
        assert not alone.losses


async def test_an_end_outside_of_every_call_counts_against_the_only_policy_of_a_run_that_was_alone():
    async with started([]) as pool:
        run = judge(await separate(pool), "exits")
        await eventually(lambda: bool(run.losses))
        assert run.losses == [(Fault("exits", 0, "exited"), True)]
        assert pool.is_apart(("exits",))
        chain = judge(await separate(pool), "passes", "exits")
        await eventually(lambda: bool(chain.losses))
        assert chain.losses == [(Fault(None, 0, "exited"), True)]


async def test_an_executor_that_ended_before_its_first_run_came_is_lost_for_that_run():
    async with started([]) as pool:
        executor = await separate(pool)
        os.kill(executor.pid, signal.SIGKILL)
        await eventually(executor.gone.done)
        run = judge(executor, "passes")
        await eventually(lambda: run.losses == [(None, False)])


async def test_a_policy_that_ended_one_executor_holds_up_none_of_its_other_runs():
    async with started([]) as pool:
        culprit = judge(await separate(pool), "exits")
        await eventually(lambda: bool(culprit.losses))
        executors = [await take(pool, "exits") for _ in range(3 * MAX_SEPARATE)]
        runs = [judge(executor, "passes") for executor in executors]
        await eventually(lambda: all(run.seen == 2 for run in runs))
        assert [executor.single for executor in executors].count(True) == MAX_SEPARATE
        assert len({executor.pid for executor in executors if not executor.single}) == 1, "the others share one"
        shared = await take(pool)
        assert shared.pid not in {executor.pid for executor in executors}, "other policies' runs are apart from them"
        for executor in executors:
            for task in [*executor.runs]:
                executor.close(task)
        await eventually(lambda: pool.count == 1)


async def test_a_call_that_holds_up_a_shared_executor_is_isolated_and_nothing_counts():
    ends: list[End] = []
    async with started(ends) as pool:
        alone = [await separate(pool) for _ in range(MAX_SEPARATE)]
        beside = judge(await take(pool), "passes")
        await eventually(lambda: beside.seen == 2)
        sleeps = judge(await take(pool), "sleeps")
        await eventually(lambda: bool(sleeps.losses and beside.losses))
        assert sleeps.losses == [(None, True)]
        assert beside.losses == [(None, False)]
        assert ends == ["stalled"]
        assert pool.is_apart(("sleeps",))
        again = judge(alone[0], "sleeps")
        await eventually(lambda: again.seen == 2)
        assert not again.losses


async def test_a_wait_for_an_executor_is_reported_until_it_is_too_long(monkeypatch: pytest.MonkeyPatch):
    async with started([]) as pool:
        alone = [await separate(pool) for _ in range(MAX_SEPARATE)]
        reports: list[None] = []
        waiting = asyncio.create_task(pool.take(("passes",), lambda: reports.append(None), alone=True, each_s=0.01))
        await eventually(lambda: len(reports) > 2)
        monkeypatch.setattr(executors_module, "MAX_WAIT_S", 0.0)
        reported = len(reports)
        beside = judge(await take(pool), "passes")
        await eventually(lambda: beside.seen == 2)  # takes several times 0.01 s
        assert len(reports) == reported
        os.kill(alone[0].pid, signal.SIGKILL)
        assert (await waiting).single, "it is still its turn once a place is free"


@pytest.mark.parametrize("exits", [True, False])
async def test_an_executor_that_is_gone_is_lost_although_a_process_of_its_policy_holds_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exits: bool
):
    monkeypatch.setattr(processes, "CLOSE_S", 0.1)
    left = tmp_path / "pid"
    leaves = PolicySpec(
        policy=f"{HARMFUL}:LeavesChild", options={"file": str(left), "exits": exits}, timeout_s=5.0, name="leaves"
    )
    work = msgspec.structs.replace(WORK, policies={"leaves": leaves})
    pool = PolicyPool(work, setup(work), most=1, on_end=lambda end: None)
    await pool.start(Liveness())
    try:
        run = judge(await separate(pool), "leaves")
        await eventually(lambda: bool(run.losses) if exits else run.seen == 2)
        assert run.losses == ([(Fault("leaves", 0, "exited"), True)] if exits else [])
    finally:
        await pool.stop()
        with suppress(ProcessLookupError):  # on Linux its executor's guard has ended it
            os.kill(int(left.read_text()), signal.SIGKILL)
