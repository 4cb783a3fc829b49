"""Turns a `take` function that raises StopAsyncIteration at its end into async iterators."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def until_stopped(take: Callable[[], Awaitable[T]]) -> AsyncGenerator[T]:
    """Yield everything that ``take`` returns."""
    while True:
        try:
            item = await take()
        except StopAsyncIteration:
            return
        yield item


async def until_left(take: Callable[[], Awaitable[T]], close: Callable[[], Awaitable[None]]) -> AsyncGenerator[T]:
    """Like `until_stopped`, and call ``close`` however the iteration ends."""
    try:
        async with aclosing(until_stopped(take)) as items:
            async for item in items:
                yield item
    finally:
        await close()
