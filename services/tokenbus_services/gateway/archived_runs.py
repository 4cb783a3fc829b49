"""Runs of which the server has nothing any more and the archive has the log."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing

from tokenbus.client.archive import Archive
from tokenbus.client.deployment import Deployment
from tokenbus.events.public import PublicEvent
from tokenbus.events.run_info import RunInfo

NEWEST = 24
"""How many of a run's last events `edges` returns."""


class ArchivedRuns:
    """Reads the archive. Without one, every answer is None or empty. All methods raise ServerError, BlobError."""

    def __init__(self, deployment: Deployment, make_archive: Callable[[], Archive]) -> None:
        self._deployment = deployment
        deployment.make_archive = make_archive

    async def info(self, run: str) -> RunInfo | None:
        """The run's summary."""
        if (archive := await self._deployment.archive()) and (log := await archive.open_log(run)):
            await log.aclose()
            return log.info
        return None

    async def events(self, run: str, *, after: int = -1) -> AsyncGenerator[PublicEvent]:
        """The run's events after this seq."""
        if (archive := await self._deployment.archive()) and (log := await archive.open_log(run, after=after)):
            async with aclosing(log):
                while found := await log.read():
                    for event in found:
                        yield event

    async def first_event(self, run: str) -> PublicEvent | None:
        """The run's first event."""
        async with aclosing(self.events(run)) as events:
            return await anext(events, None)

    async def last_event(self, run: str) -> PublicEvent | None:
        """The run's last event."""
        info, last = await self.info(run), None
        if info:
            async with aclosing(self.events(run, after=info.events - 2)) as events:
                async for event in events:
                    last = event
        return last

    async def delete(self, runs: Collection[str]) -> None:
        """Delete the logs of these runs, and what a recorder has of them."""
        if archive := await self._deployment.archive():
            for run in runs:
                await archive.delete_log(run)

    async def edges(self, run: str) -> list[PublicEvent]:
        """The first and last events of each attempt, and some more of the run's last ones."""
        firsts: dict[int, PublicEvent] = {}
        lasts: dict[int, deque[PublicEvent]] = {}
        newest = deque[PublicEvent](maxlen=NEWEST)
        async with aclosing(self.events(run)) as events:
            async for event in events:
                firsts.setdefault(event.attempt, event)
                lasts.setdefault(event.attempt, deque(maxlen=3)).append(event)
                newest.append(event)
        found = [*firsts.values(), *newest, *(event for some in lasts.values() for event in some)]
        return [event for _, event in sorted({event.seq: event for event in found}.items())]
