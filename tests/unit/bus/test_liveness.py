"""Which tasks a worker lives by, when each last made progress, and which loop only turns."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from redis.exceptions import ConnectionError as ConnectionLost

from tests.waiting import eventually
from tokenbus.bus.liveness import MAX_DEFECTS, Liveness, acquire, beat, rest, slack, wait_briefly
from tokenbus.bus.server.retry import Defects


async def test_a_task_that_ends_is_reported_unless_it_may_end():
    liveness, ended = Liveness(), list[str]()
    liveness.ended = lambda long_task: ended.append(long_task.name)

    async def nothing() -> None:
        pass

    liveness.start_passing(nothing(), name="passing")
    liveness.start(nothing(), name="long")
    await eventually(lambda: ended == ["long"])
    assert liveness.tasks == []


async def test_a_task_counts_as_stalled_since_its_last_beat():
    liveness, go = Liveness(), asyncio.Event()

    async def work() -> None:
        with slack(5):
            await go.wait()
        await asyncio.Event().wait()

    task = liveness.start(work(), name="work")
    await asyncio.sleep(0)
    [long_task] = liveness.tasks
    liveness.elapsed_s += 7
    assert (long_task.still_s, long_task.slack_s) == (7, 5)
    go.set()
    await eventually(lambda: long_task.slack_s == 0)
    assert long_task.still_s == 0
    task.cancel()
    await asyncio.wait({task})


async def test_a_beat_counts_for_the_task_that_says_it_and_not_for_those_that_it_started():
    liveness = Liveness()

    async def child() -> None:
        liveness.elapsed_s += 3
        beat()

    async def parent() -> None:
        await asyncio.create_task(child())
        await asyncio.Event().wait()

    task = liveness.start(parent(), name="parent")
    await eventually(lambda: liveness.elapsed_s == 3)
    assert liveness.tasks[0].still_s == 3
    task.cancel()
    await asyncio.wait({task})


async def test_what_waits_for_a_place_gets_it():
    lock = asyncio.Lock()
    await acquire(lock)
    waiting = asyncio.create_task(acquire(lock))
    await asyncio.sleep(0)
    assert not waiting.done()
    lock.release()
    await waiting
    assert lock.locked()


def test_a_loop_that_only_fails_ends_but_not_during_an_outage_of_its_server():
    defects = Defects()
    for _ in range(3 * MAX_DEFECTS):
        defects.count(ConnectionLost("away"))
    for _ in range(MAX_DEFECTS - 1):
        defects.count(KeyError("a defect"))
    defects.none()
    for _ in range(MAX_DEFECTS - 1):
        defects.count(KeyError("a defect"))
    with pytest.raises(KeyError):
        defects.count(KeyError("a defect"))


@pytest.mark.parametrize("waits", [lambda: rest(3600), lambda: wait_briefly(asyncio.Event())], ids=["rest", "wait"])
async def test_a_wait_after_a_command_that_took_its_whole_time_begins_with_a_beat(
    waits: Callable[[], Awaitable[object]],
) -> None:
    """A server that stalls costs a command 5 s; with the second of the wait that would be stuck."""
    liveness = Liveness()

    async def loop() -> None:
        liveness.elapsed_s += 5.0
        await waits()

    task = liveness.start(loop(), name="loop")
    await asyncio.sleep(0)
    assert [(each.name, each.still_s) for each in liveness.tasks] == [("loop", 0.0)]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
