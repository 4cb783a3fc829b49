"""Handlers in parallel across runs, one at a time within a run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from tokenbus.client.subscriptions.ack_tracker import each


class Event(msgspec.Struct, frozen=True):
    run: str
    n: int = 0


async def endless() -> AsyncIterator[Event]:
    n = 0
    while True:
        yield Event("r", n := n + 1)


async def test_a_handler_that_awaits_what_was_cancelled_has_failed() -> None:
    """As a task that was cancelled it would end in order, and the run's further events would never be handled."""
    done: list[Event] = []

    async def handler(event: Event) -> None:
        if event.n == 3:
            answer = asyncio.get_running_loop().create_future()
            answer.cancel()
            await answer

    with pytest.raises(RuntimeError, match="event of run r"):
        async with asyncio.timeout(10):
            await each(endless(), handler, done.append, concurrency=1, most=2)
    assert [event.n for event in done] == [1, 2]


async def test_a_cancel_of_the_caller_is_one() -> None:
    begun = asyncio.Event()

    async def handler(event: Event) -> None:
        begun.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(each(endless(), handler, lambda event: None, concurrency=1, most=2))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
