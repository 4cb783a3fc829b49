"""Reads a run's events ahead of the writer of an answer, and notices when the client has disconnected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

from tokenbus.client.decode import is_end
from tokenbus.client.tailing import Wakeup
from tokenbus.events.public import BlockComplete, Chunk, PublicEvent

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
MAX_AHEAD = 512
MAX_AHEAD_CHARACTERS = 256 * 1024
"""Events that are read ahead of a slow client, and their text."""


class RunReader:
    """One reader of a run, for one answer: ``async with``. Take all events that one wake-up brought with `take`."""

    def __init__(self, events: AsyncGenerator[PublicEvent], receive: Receive) -> None:
        """``receive``: of the ASGI app. Once the body has been read, it reports only the client's disconnect."""
        self.gone = False
        """The client has closed its connection."""
        self.ended = False
        """The terminal event was taken, or reading failed: no event follows."""
        self._events = events
        self._receive = receive
        self._taken: list[PublicEvent] = []
        self._characters = 0
        self._error: Exception | None = None
        self._done = False
        self._news = Wakeup()
        self._room = Wakeup()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [
            asyncio.create_task(self._read(), name="reader of a run"),
            asyncio.create_task(self._watch(), name="watcher of a client"),
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def take(self, wait_s: float) -> list[PublicEvent]:
        """Return the next events; empty if none came in time, the client has disconnected, or the run has ended.

        Raises the error that ended reading, once all events before it were taken.
        """
        if not self._taken and not self._done and not self.gone:
            self._news.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await self._news.wait()
            except TimeoutError:
                return []
        if not self._taken:
            self.ended = self.ended or self._done
            if self._error and not self.gone:
                raise self._error
            return []
        taken, self._taken, self._characters = self._taken, [], 0
        self._room.set()
        if is_end(taken[-1]):
            self.ended = True
        return taken

    async def _read(self) -> None:
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    self._taken.append(event)
                    self._characters += _characters(event)
                    self._news.set()
                    if len(self._taken) >= MAX_AHEAD or self._characters >= MAX_AHEAD_CHARACTERS:
                        self._room.clear()
                        await self._room.wait()
        except Exception as e:  # a defect too: without it the answer would end as if nothing were wrong
            self._error = e
        finally:
            self._done = True
            self._news.set()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        self._news.set()


def _characters(event: PublicEvent) -> int:
    match event:
        case Chunk():
            return len(event.text)
        case BlockComplete():
            media = (event.image and event.image.base64, event.audio and event.audio.base64)
            return sum(len(each or "") for each in (event.content, event.arguments, *media))
        case _:
            return 0
