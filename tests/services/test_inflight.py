"""Items in hand: how they are stopped. The queue is a stand-in, for nothing here asks it anything but to be done."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast
from unittest.mock import AsyncMock

from tests.waiting import eventually
from tokenbus.bus.queue import Item, Queue
from tokenbus_services.worker.inflight import InFlight

ITEM = Item("turns", "1-0", {b"run-1": b""}, 1)


class _Queue:
    """Takes what is finished."""

    def __init__(self) -> None:
        self.finished = asyncio.Event()

    async def finish(self, items: list[Item], *, again: Callable[[], Awaitable[None]] | None) -> None:
        """Takes it at the second try."""
        assert items == [ITEM]
        if again:
            await again()
        self.finished.set()


async def never(*_: object) -> None:
    raise AssertionError("nothing of this kind happens here")


async def test_what_an_item_came_to_is_said_again_where_its_finish_is_tried_again():
    told: list[str] = []

    async def work(item: Item) -> None:
        told.append("done")

    async def again(item: Item) -> None:
        assert item is ITEM
        told.append("again")

    queue = _Queue()
    inflight = InFlight(cast("Queue", queue), most=1, work=work, abandon=never, poisoned=never, again=again)
    await inflight.start(ITEM)
    await queue.finished.wait()
    assert told == ["done", "again"]


async def test_of_poison_nothing_is_said_again():
    async def work(item: Item) -> None:
        raise ValueError("poison")

    async def poisoned(item: Item, error: Exception) -> None:
        assert isinstance(error, ValueError)

    queue = _Queue()
    inflight = InFlight(cast("Queue", queue), most=1, work=work, abandon=never, poisoned=poisoned, again=never)
    await inflight.start(ITEM)
    await queue.finished.wait()


async def test_work_that_is_stopped_twice_still_closes_what_it_holds():
    """A cancel is heard twice: on the control stream, and when the server refuses what the work writes."""
    began, closing, closed = asyncio.Event(), asyncio.Event(), asyncio.Event()
    let_close = asyncio.Event()

    async def work(item: Item) -> None:
        try:
            began.set()
            await asyncio.Event().wait()
        finally:
            closing.set()
            await let_close.wait()
            closed.set()

    queue = _Queue()
    inflight = InFlight(cast("Queue", queue), most=1, work=work, abandon=never, poisoned=never)
    await inflight.start(ITEM)
    await began.wait()
    inflight.cancel("run-1")
    await closing.wait()
    inflight.stop_item(ITEM)
    let_close.set()
    await queue.finished.wait()
    assert closed.is_set()


async def test_of_a_runs_items_only_those_that_are_meant_are_stopped():
    old, new = ITEM, Item("turns", "2-0", {b"run-1": b""}, 1)
    going_on, ended = asyncio.Event(), list[Item]()

    async def work(item: Item) -> None:
        try:
            await going_on.wait()
        finally:
            ended.append(item)

    queue = AsyncMock()
    inflight = InFlight(queue, most=2, work=work, abandon=never, poisoned=never)
    await inflight.start(old)
    await inflight.start(new)
    await asyncio.sleep(0)  # so that both have begun
    inflight.cancel("run-1", which=lambda item: item is old)
    await eventually(lambda: ended == [old])
    assert len(inflight) == 1
    going_on.set()
    await eventually(lambda: ended == [old, new] and not len(inflight))


async def test_an_item_that_comes_back_while_its_lost_work_ends_is_worked_and_counted_once():
    begun: list[asyncio.Event] = []
    let_close = asyncio.Event()

    async def work(item: Item) -> None:
        go_on = asyncio.Event()
        begun.append(go_on)
        try:
            await go_on.wait()
        finally:
            if len(begun) == 1:
                await let_close.wait()

    async def never(*_: object) -> None:
        raise AssertionError("nothing is abandoned or poisoned here")

    queue = _Queue()
    inflight = InFlight(cast("Queue", queue), most=2, work=work, abandon=never, poisoned=never)
    await inflight.start(ITEM)
    await eventually(lambda: len(begun) == 1)
    inflight.lost(ITEM)
    await inflight.start(ITEM)
    await eventually(lambda: len(begun) == 2)
    let_close.set()
    begun[1].set()
    await queue.finished.wait()
    await eventually(lambda: len(inflight) == 0)
    for _ in range(2):
        await asyncio.wait_for(inflight.room(), timeout=60)
