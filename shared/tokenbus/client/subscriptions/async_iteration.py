"""Async iteration over what a `take` gives until it raises StopAsyncIteration."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def until_stopped(take: Callable[[], Awaitable[T]]) -> AsyncGenerator[T]:
    """All that ``take`` gives."""
    while True:
        try:
            item = await take()
        except StopAsyncIteration:
            return
        yield item


async def until_left(take: Callable[[], Awaitable[T]], close: Callable[[], Awaitable[None]]) -> AsyncGenerator[T]:
    """The same, and ``close`` however the iteration ends."""
    try:
        async with aclosing(until_stopped(take)) as items:
            async for item in items:
                yield item
    finally:
        await close()
