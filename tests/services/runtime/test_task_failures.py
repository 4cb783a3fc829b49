"""Work of which some hangs: it goes on aside, bounded, and holds up no other."""

from __future__ import annotations

import asyncio
from functools import partial

from tests.waiting import eventually
from tokenbus_services.runtime.task_failures import LoggedTasks


async def test_what_hangs_goes_on_aside_and_the_others_are_done() -> None:
    tasks, gate, done = LoggedTasks("test", most=10), asyncio.Event(), list[str]()

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
    tasks, gate, begun = LoggedTasks("test", most=2), asyncio.Event(), list[int]()

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


async def test_what_is_under_way_ends_with_the_worker() -> None:
    tasks, cancelled = LoggedTasks("test", most=2), asyncio.Event()

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    await tasks.run([hang])
    await tasks.close()
    assert cancelled.is_set()
