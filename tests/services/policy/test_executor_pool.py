"""Executors of their own: whatever becomes of whom asked for one, each is known by its own process id."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import cast

import pytest

from tests.waiting import eventually
from tokenbus.bus.liveness import Liveness
from tokenbus.policy.loading import PolicySpec
from tokenbus_services.policy_stage import fork_server
from tokenbus_services.policy_stage.blame import End, Fault
from tokenbus_services.policy_stage.executor_client import ExecutorProcess
from tokenbus_services.policy_stage.executor_pool import MAX_SEPARATE, ExecutorPool
from tokenbus_services.policy_stage.messages import Setup, Verdicts

SETUP = Setup(
    policies={"passes": PolicySpec(policy="tokenbus.policy:StreamProcessor", timeout_s=5.0)},
    calls=4,
    reassure_s=1.0,
    memory_bytes=2**28,
    redis_url="redis://127.0.0.1:1",
    prefix="t",
    partitions=1,
    run_ttl_ms=1000,
    path=sys.path,
    log_level="info",
    secrets=[],
)


class Run:
    """A run in an executor, and what became of it."""

    def __init__(self) -> None:
        self.losses: list[tuple[Fault | None, bool]] = []

    def on_verdicts(self, message: Verdicts) -> None: ...

    def on_waiting(self) -> None: ...

    def on_finished(self) -> None: ...

    def on_lost(self, fault: Fault | None, *, suspect: bool) -> None:
        self.losses.append((fault, suspect))


@asynccontextmanager
async def started(ends: list[End]) -> AsyncGenerator[ExecutorPool]:
    pool = ExecutorPool(SETUP, most=1, on_end=ends.append)
    await pool.start(Liveness())
    try:
        yield pool
    finally:
        await pool.stop()


async def separate(pool: ExecutorPool) -> ExecutorProcess:
    return cast(ExecutorProcess, await pool.separate(lambda: None, each_s=1.0))


async def test_who_stops_waiting_for_an_executor_leaves_no_other_with_a_wrong_process_id():
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
        await eventually(lambda: pool.count == MAX_SEPARATE)  # the others, and the shared one; nobody's are gone


async def test_a_fork_server_that_is_given_up_is_no_runs_fault(monkeypatch: pytest.MonkeyPatch):
    ends: list[End] = []
    async with started(ends) as pool:
        run = Run()
        alone = await separate(pool)
        alone.open("r", ("passes",), {}, run)
        monkeypatch.setattr(fork_server, "FORK_S", 0.0)
        waiting = asyncio.create_task(separate(pool))
        await eventually(lambda: bool(run.losses))
        monkeypatch.undo()
        await waiting
        assert run.losses == [(None, False)]
