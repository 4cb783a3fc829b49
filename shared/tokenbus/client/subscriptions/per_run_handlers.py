"""Runs handlers in parallel across runs, one at a time within a run."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Generic, NamedTuple, Protocol, TypeVar

from tokenbus.bus.liveness import is_cancelled


class OfRun(Protocol):
    """Anything that belongs to a run."""

    @property
    def run(self) -> str: ...


E = TypeVar("E", bound=OfRun)


class Again(NamedTuple):
    """What a handler returns for an event that it must get again."""

    pause_s: float | None
    """None: another process gets it."""


async def each(
    events: AsyncIterator[E],
    handler: Callable[[E], Awaitable[object]],
    done: Callable[[E], object],
    *,
    concurrency: int,
    most: int,
) -> None:
    """Handle all events, up to ``concurrency`` runs in parallel. Calls ``done`` with each event whose handler has
    returned. If it returned `Again`, only the event's run waits, and takes no place of the ``concurrency`` meanwhile.

    Holds at most ``most`` events. Returns when the events end. On the first error of a handler or of the events,
    cancels all other handlers and raises it. Raises ValueError for bounds below 1.
    """
    if concurrency < 1 or most < 1:
        raise ValueError("concurrency and prefetch: at least 1")
    lanes = _Lanes(handler, done, concurrency, most)
    try:
        async with asyncio.TaskGroup() as group:
            try:
                async for event in events:
                    await lanes.put(group, event)
            finally:
                lanes.ended.set()
    except BaseExceptionGroup as e:
        raise e.exceptions[0] from None


class _Lanes(Generic[E]):
    def __init__(
        self, handler: Callable[[E], Awaitable[object]], done: Callable[[E], object], concurrency: int, most: int
    ) -> None:
        self._handler = handler
        self._done = done
        self.ended = asyncio.Event()
        """Set when no more events come: then no run waits to try one again."""
        self._free = asyncio.Semaphore(concurrency)
        self._room = asyncio.Semaphore(most)
        self._lanes: dict[str, deque[E]] = {}
        """Per run: events queued behind the one being handled."""

    async def put(self, group: asyncio.TaskGroup, event: E) -> None:
        await self._room.acquire()
        lane = self._lanes.get(event.run)
        if lane is None:
            await self._free.acquire()
            lane = self._lanes[event.run] = deque([event])
            group.create_task(self._work(event.run, lane))
        else:
            lane.append(event)

    async def _work(self, run: str, lane: deque[E]) -> None:
        while lane:
            event = lane[0]
            try:
                result = await self._handler(event)
            except asyncio.CancelledError as e:
                if is_cancelled():
                    raise
                # A task group takes it for an end in order, and the run's further events would wait for ever.
                raise RuntimeError(f"the handler of an event of run {event.run} awaited what was cancelled") from e
            if isinstance(result, Again) and result.pause_s is not None:
                self._free.release()
                with suppress(TimeoutError):
                    async with asyncio.timeout(result.pause_s):
                        await self.ended.wait()
                await self._free.acquire()
                if self.ended.is_set():
                    break
                continue
            lane.popleft()
            if not isinstance(result, Again):
                self._done(event)
            self._room.release()
        del self._lanes[run]
        self._free.release()
