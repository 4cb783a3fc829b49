"""Work of which some hangs: it continues in the background, bounded, and delays no other."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from tests.waiting import eventually
from tokenbus.bus.liveness import STUCK_OF_MANY_NODES_S, Liveness, wait_briefly
from tokenbus_services.runtime import task_failures
from tokenbus_services.runtime.task_failures import LoggedTasks


async def test_a_hanging_task_continues_in_the_background_and_the_others_finish() -> None:
    tasks, gate, done = LoggedTasks("test", most=lambda: 10), asyncio.Event(), list[str]()

    async def hang() -> None:
        await gate.wait()
        done.append("hung")

    async def work() -> None:
        done.append("worked")

    await tasks.run([hang, work])
    assert done == ["worked"]
    gate.set()
    await eventually(lambda: done == ["worked", "hung"])
    await tasks.close()


async def test_no_more_run_at_once_than_there_are_places() -> None:
    tasks, gate, begun = LoggedTasks("test", most=lambda: 2), asyncio.Event(), list[int]()

    async def hang(n: int) -> None:
        begun.append(n)
        await gate.wait()

    running = asyncio.create_task(tasks.run(partial(hang, n) for n in range(3)))
    await eventually(lambda: begun == [0, 1])
    assert not running.done()
    gate.set()
    await running
    assert begun == [0, 1, 2]
    await tasks.close()


async def test_the_places_follow_a_number_that_grows_while_some_wait_for_one() -> None:
    places, gate, begun = [1], asyncio.Event(), list[int]()
    tasks = LoggedTasks("test", most=lambda: places[0])

    async def hang(n: int) -> None:
        begun.append(n)
        await gate.wait()

    running = asyncio.create_task(tasks.run(partial(hang, n) for n in range(3)))
    await eventually(lambda: begun == [0])
    places[0] = 3
    await eventually(lambda: begun == [0, 1, 2])
    gate.set()
    await running
    await tasks.close()


@pytest.mark.parametrize("moves", [True, False])
async def test_a_full_set_is_no_sign_of_life_unless_something_in_it_moves(
    moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_failures, "CHECK_S", 0.01)
    tasks, gate, begun, liveness = LoggedTasks("test", most=lambda: 2), asyncio.Event(), list[int](), Liveness()

    async def hang(n: int) -> None:
        begun.append(n)
        while not await wait_briefly(gate, timeout_s=0.005) if moves and n == 0 else not await gate.wait():
            pass

    caller = liveness.start(tasks.run(partial(hang, n) for n in range(3)), name="caller")
    await eventually(lambda: begun == [0, 1])
    [watched] = liveness.tasks
    for _ in range(5):
        liveness.elapsed_s += STUCK_OF_MANY_NODES_S
        await asyncio.wait({caller}, timeout=0.05)
    assert (watched.still_s == 0) is moves
    assert (watched.still_s >= 3 * STUCK_OF_MANY_NODES_S) is not moves
    liveness.close()
    gate.set()
    await caller
    await tasks.close()


async def test_what_is_under_way_ends_with_the_worker() -> None:
    tasks, cancelled = LoggedTasks("test", most=lambda: 2), asyncio.Event()

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    await tasks.run([hang])
    await tasks.close()
    assert cancelled.is_set()
