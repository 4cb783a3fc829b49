"""How a subscription is iterated: inside ``async with`` or without it, and by handlers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from types import TracebackType
from typing import Generic, Self, TypeVar

T = TypeVar("T")


async def until_stopped(take: Callable[[], Awaitable[T]]) -> AsyncGenerator[T]:
    """Yield everything that ``take`` returns."""
    while True:
        try:
            item = await take()
        except StopAsyncIteration:
            return
        yield item


class EnteredOrIterated(ABC, Generic[T]):
    """Starts when it is entered or first iterated. Without ``async with``, the end of the iteration closes it."""

    _entered = False

    async def __aenter__(self) -> Self:
        self._entered = True
        await self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._last_is_done()
        await self.aclose()

    def __aiter__(self) -> AsyncIterator[T]:
        return self if self._entered else self._until_left()

    @abstractmethod
    async def __anext__(self) -> T: ...

    @abstractmethod
    async def aclose(self) -> None:
        """End the iteration."""

    @abstractmethod
    async def _start(self) -> None:
        """Begin, if it is entered."""

    def _last_is_done(self) -> None:
        """Acknowledge the item that was taken last, if that is still to be done."""

    async def _until_left(self) -> AsyncGenerator[T]:
        """Yield everything, and close it however the iteration ends."""
        try:
            async with aclosing(until_stopped(self.__anext__)) as items:
                async for item in items:
                    yield item
        finally:
            await self.aclose()
