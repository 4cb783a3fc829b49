"""The coalescer on a stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from tokenbus import Chunk, PublicEvent, coalesced
from tokenbus.errors import CursorTrimmed


def chunk(seq: int, text: str) -> Chunk:
    return Chunk(run="r", seq=seq, turn=0, attempt=1, block=0, kind="text", text=text, visible=True, depth=0)


async def test_chunks_that_wait_come_joined_when_their_time_is_over_though_nothing_follows():
    more = asyncio.Event()

    async def events() -> AsyncGenerator[PublicEvent]:
        yield chunk(0, "a")
        yield chunk(1, "b")
        await more.wait()
        yield chunk(2, "c")

    joined = coalesced(events(), hold_s=0.02)
    assert await anext(joined) == chunk(1, "ab")
    more.set()
    assert [event async for event in joined] == [chunk(2, "c")]


async def test_an_error_comes_after_what_came_before_it_and_the_source_is_closed():
    closed: list[bool] = []

    async def events() -> AsyncGenerator[PublicEvent]:
        try:
            yield chunk(0, "a")
            yield chunk(1, "b")
            raise CursorTrimmed("k", "1", "2")
        finally:
            closed.append(True)

    joined = coalesced(events(), hold_s=60)
    assert await anext(joined) == chunk(1, "ab")
    with pytest.raises(CursorTrimmed):
        await anext(joined)
    assert closed


async def test_leaving_closes_the_source_that_waits():
    closed: list[bool] = []

    async def events() -> AsyncGenerator[PublicEvent]:
        try:
            yield chunk(0, "a")
            await asyncio.Event().wait()
        finally:
            closed.append(True)

    tasks = asyncio.all_tasks()
    joined = coalesced(events(), hold_s=0)
    assert await anext(joined) == chunk(0, "a")
    waiting = asyncio.ensure_future(anext(joined))
    done, _ = await asyncio.wait({waiting}, timeout=0)
    assert not done
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await joined.aclose()
    assert closed
    assert asyncio.all_tasks() == tasks
