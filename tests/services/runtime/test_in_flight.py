"""Items in hand: how they are stopped. The queue is a stand-in, for nothing here asks it anything but to be done."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeAlias, cast
from unittest.mock import AsyncMock, Mock
from weakref import ref

import pytest

from tests.waiting import eventually
from tokenbus.bus.liveness import Liveness, beat, slack
from tokenbus.bus.work_queue import QueueItem, WorkQueue
from tokenbus_services.runtime import queue_work as module
from tokenbus_services.runtime.queue_work import InFlight, Later

ITEM = QueueItem("turns", "1-0", {b"run-1": b""}, 1)

Work: TypeAlias = Callable[[QueueItem], Awaitable[None]]
Poisoned: TypeAlias = Callable[[QueueItem, Exception], Awaitable[None]]


class _Queue:
    """Takes what is finished."""

    def __init__(self) -> None:
        self.finished = asyncio.Event()

    async def finish(self, items: list[QueueItem], *, again: Callable[[], Awaitable[None]] | None) -> None:
        """Takes it at the second try."""
        assert items == [ITEM]
        if again:
            await again()
        self.finished.set()


async def never(*_: object) -> None:
    raise AssertionError("nothing of this kind happens here")


def in_flight(
    queue: object,
    work: Work,
    *,
    most: int = 1,
    poisoned: Poisoned = never,
    again: Work | None = None,
    still_s: float = 3600.0,
    liveness: Liveness | None = None,
) -> InFlight:
    """Work on the queue's items, of which none is abandoned. Each may go without progress for ``still_s``."""
    return InFlight(
        cast("WorkQueue", queue),
        most=most,
        work=work,
        abandon=never,
        poisoned=poisoned,
        again=again,
        still_s=lambda item: still_s,
        liveness=liveness,
    )


async def test_a_retried_finish_reports_the_same_outcome():
    calls: list[str] = []

    async def work(item: QueueItem) -> None:
        calls.append("done")

    async def again(item: QueueItem) -> None:
        assert item is ITEM
        calls.append("again")

    queue = _Queue()
    inflight = in_flight(queue, work, again=again)
    await inflight.start(ITEM)
    await queue.finished.wait()
    assert calls == ["done", "again"]


async def test_a_poison_entry_is_finished_without_a_message():
    async def work(item: QueueItem) -> None:
        raise ValueError("poison")

    async def poisoned(item: QueueItem, error: Exception) -> None:
        assert isinstance(error, ValueError)

    queue = _Queue()
    inflight = in_flight(queue, work, poisoned=poisoned, again=never)
    await inflight.start(ITEM)
    await queue.finished.wait()


async def test_work_that_ends_with_no_ordinary_exception_is_poison_and_not_taken_for_done():
    """A library written in Rust panics with an exception that is not an `Exception`."""

    class Panic(BaseException):
        pass

    reported: list[str] = []

    async def work(item: QueueItem) -> None:
        raise Panic("index out of bounds")

    async def poisoned(item: QueueItem, error: Exception) -> None:
        reported.append(str(error))

    queue = _Queue()
    inflight = in_flight(queue, work, poisoned=poisoned, again=never)
    await inflight.start(ITEM)
    await queue.finished.wait()
    assert reported == ["the work ended with Panic"]


async def test_work_that_is_stopped_twice_still_closes_what_it_holds():
    """A cancel arrives twice: on the control stream, and when the server refuses a write of the work."""
    began, closing, closed = asyncio.Event(), asyncio.Event(), asyncio.Event()
    let_close = asyncio.Event()

    async def work(item: QueueItem) -> None:
        try:
            began.set()
            await asyncio.Event().wait()
        finally:
            closing.set()
            await let_close.wait()
            closed.set()

    queue = _Queue()
    inflight = in_flight(queue, work)
    await inflight.start(ITEM)
    await began.wait()
    inflight.cancel("run-1")
    await closing.wait()
    inflight.stop_item(ITEM)
    let_close.set()
    await queue.finished.wait()
    assert closed.is_set()


async def test_of_a_runs_items_only_those_that_are_meant_are_stopped():
    old, new = ITEM, QueueItem("turns", "2-0", {b"run-1": b""}, 1)
    going_on, ended = asyncio.Event(), list[QueueItem]()

    async def work(item: QueueItem) -> None:
        try:
            await going_on.wait()
        finally:
            ended.append(item)

    queue = AsyncMock()
    inflight = in_flight(queue, work, most=2)
    await inflight.start(old)
    await inflight.start(new)
    await asyncio.sleep(0)  # so that both have begun
    inflight.cancel("run-1", which=lambda item: item is old)
    await eventually(lambda: ended == [old])
    assert len(inflight) == 1
    going_on.set()
    await eventually(lambda: ended == [old, new] and not len(inflight))


async def test_work_that_does_not_end_when_it_is_stopped_is_left_to_another_worker(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "ABANDON_S", 0.01)
    queue, begun, free = Mock(), asyncio.Event(), asyncio.Event()

    async def stubborn(item: QueueItem) -> None:
        begun.set()
        while not free.is_set():
            with suppress(asyncio.CancelledError):
                await free.wait()

    inflight = in_flight(queue, stubborn)
    await inflight.start(ITEM)
    await begun.wait()
    await inflight.stop()
    queue.release.assert_called_once_with([ITEM])
    assert len(inflight) == 0
    free.set()
    await inflight.room()  # it was given back once


async def test_work_cancelled_without_a_stop_is_left_to_another_worker():
    """A cancellation can leak out of a library: finished, the run would be open forever; kept alive, too."""
    queue = AsyncMock()
    queue.release = release = Mock()

    async def work(item: QueueItem) -> None:
        raise asyncio.CancelledError

    inflight = in_flight(queue, work)
    await inflight.start(ITEM)
    await eventually(lambda: not len(inflight))
    release.assert_called_once_with([ITEM])
    queue.finish.assert_not_called()
    await inflight.room()


async def test_an_item_that_comes_back_while_its_lost_work_ends_is_worked_and_counted_once():
    begun: list[asyncio.Event] = []
    let_close = asyncio.Event()

    async def work(item: QueueItem) -> None:
        proceed = asyncio.Event()
        begun.append(proceed)
        try:
            await proceed.wait()
        finally:
            if len(begun) == 1:
                await let_close.wait()

    queue = _Queue()
    inflight = in_flight(queue, work, most=2)
    await inflight.start(ITEM)
    await eventually(lambda: len(begun) == 1)
    inflight.on_claimed_away(ITEM)
    await inflight.start(ITEM)
    await eventually(lambda: len(begun) == 2)
    let_close.set()
    begun[1].set()
    await queue.finished.wait()
    await eventually(lambda: len(inflight) == 0)
    for _ in range(2):
        await asyncio.wait_for(inflight.room(), timeout=60)


@pytest.mark.parametrize("ends_when_cancelled", [True, False])
async def test_work_without_progress_for_longer_than_its_bound_is_stopped_and_is_poison(
    monkeypatch: pytest.MonkeyPatch, ends_when_cancelled: bool
):
    monkeypatch.setattr(module, "CHECK_S", 0.01)
    monkeypatch.setattr(module, "ABANDON_S", 0.01)
    let_end, why = asyncio.Event(), list[Exception]()

    async def work(item: QueueItem) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if ends_when_cancelled:
                raise
            await let_end.wait()

    async def poisoned(item: QueueItem, error: Exception) -> None:
        why.append(error)

    queue, liveness = _Queue(), Liveness()
    inflight = in_flight(queue, work, poisoned=poisoned, still_s=60.0, liveness=liveness)
    await inflight.start(ITEM)
    await asyncio.sleep(0.05)
    assert not why
    liveness.elapsed_s += 61
    await queue.finished.wait()
    assert "no progress for 60 s" in str(why[0])
    await inflight.room()  # for the next
    let_end.set()


async def test_a_step_with_a_bound_of_its_own_may_take_that_and_the_next_one_may_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "CHECK_S", 0.01)
    in_next, proceed, why = asyncio.Event(), asyncio.Event(), list[Exception]()

    async def work(item: QueueItem) -> None:
        with slack(100):
            await asyncio.create_task(proceed.wait())
        in_next.set()
        await asyncio.Event().wait()

    async def poisoned(item: QueueItem, error: Exception) -> None:
        why.append(error)

    queue, liveness = _Queue(), Liveness()
    inflight = in_flight(queue, work, poisoned=poisoned, still_s=60.0, liveness=liveness)
    await inflight.start(ITEM)
    await asyncio.sleep(0)
    liveness.elapsed_s += 150
    await asyncio.sleep(0.05)
    assert not why
    proceed.set()
    await in_next.wait()
    await asyncio.sleep(0.05)
    assert not why
    liveness.elapsed_s += 61
    await queue.finished.wait()
    assert "no progress for 60 s" in str(why[0])


async def test_work_that_gets_on_is_left_to_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "CHECK_S", 0.001)
    liveness = Liveness()

    async def work(item: QueueItem) -> None:
        for _ in range(5):
            liveness.elapsed_s += 50
            await asyncio.create_task(part())  # what it consists of counts, too
            await asyncio.sleep(0.01)

    async def part() -> None:
        beat()

    queue = _Queue()
    inflight = in_flight(queue, work, still_s=60.0, liveness=liveness)
    await inflight.start(ITEM)
    await queue.finished.wait()


async def test_work_that_cannot_be_done_now_is_requeued_at_the_end_of_its_queue():
    async def work(item: QueueItem) -> None:
        raise Later

    queue = AsyncMock()
    inflight = in_flight(queue, work)
    await inflight.start(ITEM)
    await eventually(lambda: not len(inflight))
    queue.requeue.assert_awaited_once_with([ITEM])
    queue.finish.assert_not_awaited()


class _Buffer:
    """What the work holds."""


@pytest.mark.parametrize("ends", ["stopped", Later])
async def test_the_frames_of_stopped_and_postponed_work_are_freed_without_the_collector(ends: object) -> None:
    begun, held = asyncio.Event(), list[ref[_Buffer]]()

    async def work(item: QueueItem) -> None:
        buffer, limit = _Buffer(), asyncio.timeout(60)
        held.append(ref(buffer))
        async with limit:  # knows this task
            begun.set()
            if ends is Later:
                raise Later
            await asyncio.Event().wait()
        del buffer

    queue = Mock(finish=AsyncMock(), requeue=AsyncMock())
    inflight = in_flight(queue, work)
    gc.collect()
    gc.disable()
    try:
        await inflight.start(ITEM)
        await begun.wait()
        inflight.stop_item(ITEM)
        await inflight.drain(60)
        await eventually(lambda: held[0]() is None, timeout=10)
    finally:
        gc.enable()
