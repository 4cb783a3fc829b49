"""Lists the runs of a deployment: open and ended ones of all partitions, in the order of time."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Sequence
from datetime import timedelta
from typing import Literal, TypeAlias

import msgspec

from tokenbus.bus.keys import Keys
from tokenbus.bus.run_index import IndexReader, Position, fill, merged, read_runs
from tokenbus.bus.server.server import translated
from tokenbus.client.archive import Archive
from tokenbus.client.deployment import Deployment
from tokenbus.core.nearest_name import unknown_name
from tokenbus.events.run_info import ENDED_STATES, OPEN_STATES, ListedState, RunInfo

StateFilter: TypeAlias = Literal["open", "ended"] | ListedState
"""A state, or ``open`` (queued and running) or ``ended`` (the others)."""
_STATES: dict[str, tuple[ListedState, ...]] = {
    "open": OPEN_STATES,
    "ended": ENDED_STATES,
    **{state: (state,) for state in (*OPEN_STATES, *ENDED_STATES)},
}
BATCH = 256
"""Summaries read in one pipeline."""
LEAST_PAGE = 4
ONE_READ = 4096
"""Members of the index read at once, from all of its sorted sets."""


class RunFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which runs to list."""

    states: frozenset[ListedState]
    tenant: str | None = None
    provider: str | None = None
    older_than_s: float | None = None
    prefix: str | None = None

    def wants(self, info: RunInfo) -> bool:
        """Whether the run passes, apart from its age."""
        return (
            info.state in self.states
            and (self.tenant is None or info.tenant == self.tenant)
            and (self.provider is None or info.provider == self.provider)
        )

    @property
    def wants_all(self) -> bool:
        """Whether every member of the index that is read passes."""
        halves = (frozenset(OPEN_STATES), frozenset(ENDED_STATES))
        whole = all(self.states & half in (half, frozenset()) for half in halves)
        return whole and self.provider is None and self.prefix is None


def run_filter(
    *,
    state: StateFilter | Collection[StateFilter] | None = None,
    tenant: str | None = None,
    provider: str | None = None,
    older_than: float | timedelta | None = None,
    prefix: str | None = None,
) -> RunFilter:
    """Check the arguments of `Client.runs`. Raises ValueError."""
    for name, value in (("tenant", tenant), ("provider", provider), ("prefix", prefix)):
        if value is not None and (not isinstance(value, str) or not value):  # pyright: ignore[reportUnnecessaryIsInstance] - users without a type checker
            raise ValueError(f"{name}: {value!r} is not a text, or empty")
    return RunFilter(
        states=_states(state),
        tenant=tenant,
        provider=provider,
        older_than_s=seconds_of(older_than),
        prefix=prefix,
    )


def _states(state: StateFilter | Collection[StateFilter] | None) -> frozenset[ListedState]:
    if state is None:
        return frozenset((*OPEN_STATES, *ENDED_STATES))
    names = [state] if isinstance(state, str) else list(state)
    for name in names:
        if name not in _STATES:
            raise ValueError(f"state: {unknown_name(name, _STATES)}")
    if not names:
        raise ValueError("state: no state is named")
    return frozenset(each for name in names for each in _STATES[name])


def seconds_of(age: float | timedelta | None) -> float | None:
    """An age in seconds. Raises ValueError."""
    seconds = age.total_seconds() if isinstance(age, timedelta) else age
    if seconds is None:
        return None
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 <= seconds < float("inf"):  # pyright: ignore[reportUnnecessaryIsInstance] - users without a type checker
        raise ValueError(f"older_than: {age!r} is neither a number of seconds from 0 nor a timedelta")
    return seconds


class RunLister:
    """Reads the list page by page. `next` costs a bounded number of reads, however few runs pass the filter."""

    def __init__(
        self,
        deployment: Deployment,
        wanted: RunFilter,
        *,
        after: Position | None = None,
        newest_first: bool = True,
        limit: int | None = None,
        archived: bool = False,
    ) -> None:
        """``limit``: how many runs the caller will use, so that no more are read. ``archived``: list the archive
        too.
        """
        self._deployment = deployment
        self._wanted = wanted
        self._after = after
        self._newest_first = newest_first
        self._limit = limit
        self._archived = archived and not wanted.states.isdisjoint(ENDED_STATES)
        self._archive: ArchiveSource | None = None
        self._sources: list[IndexReader] | None = None
        self._page = 0
        self._moved: set[str] = set()
        """Runs found open and read when they had just ended: oldest first, they come again."""
        self.position = after
        """The list's position: all runs up to here were examined."""
        self.ended = False
        """Whether the list is complete."""

    async def next(self) -> list[tuple[Position, RunInfo]]:
        """Look at the next runs of the list, at most `BATCH`, and return those that pass with their places; perhaps
        none.

        Raises ServerUnavailable, DeploymentMismatch; BlobError if the archive does not answer; RuntimeError if the
        client is closed.
        """
        deployment = self._deployment
        keys = await deployment.keys()
        if self._sources is None:
            await deployment.refresh()  # more partitions may have been added
            archive = await deployment.archive() if self._archived else None
            self._archive = archive and await self._open_archive(archive)
        if self._archive:
            await self._archive.fill()
        client = deployment.server.client
        async with deployment.hub.reads:
            with translated(deployment.server):
                if self._sources is None:
                    self._sources = await self._open(keys)
                    await fill(client, self._sources, self._page)
                    _drop_repeated(self._sources)
                else:
                    await fill(client, self._sources, self._page)
                sources = [*self._sources, self._archive] if self._archive else self._sources
                order = merged(sources, self._most, newest_first=self._newest_first)
                looked_at = list(dict.fromkeys(place for _, place in order))  # on the server, and archived
                places = [place for place in looked_at if self._may_pass(place)]
                found: list[RunInfo | None] = list(await read_runs(client, keys, [place.run for place in places]))
        if self._archive:
            archived = [self._archive.infos.get(place) for place in places]
            # A server that was restored may have a run that is open there, and ended in the archive.
            found = [
                None if there and info and info.at_ms != place.at_ms else info or there
                for place, info, there in zip(places, found, archived, strict=True)
            ]
            self._archive.used(looked_at)
        if looked_at:
            self.position = looked_at[-1]
        self.ended = all(source.exhausted and not source.found for source in sources)
        passed: list[tuple[Position, RunInfo]] = []
        for place, info in zip(places, found, strict=True):
            if info is None:
                continue
            if info.at_ms != place.at_ms:
                self._moved.add(place.run)
            if self._wanted.wants(info):
                passed.append((place, info))
        if self._limit is not None:
            self._limit -= len(passed)
        return passed

    def _may_pass(self, place: Position) -> bool:
        prefix = self._wanted.prefix
        return place.run not in self._moved and (prefix is None or place.run.startswith(prefix))

    async def _open_archive(self, archive: Archive) -> ArchiveSource:
        until_ms = await self._until_ms()
        return ArchiveSource(archive, self._wanted.tenant, self._after, until_ms, newest_first=self._newest_first)

    async def _until_ms(self) -> int | None:
        if self._wanted.older_than_s is None:
            return None
        await self._deployment.server.clock.measure()
        return self._deployment.server.clock.now_ms() - round(self._wanted.older_than_s * 1000)

    async def _open(self, keys: Keys) -> list[IndexReader]:
        until_ms = await self._until_ms()
        halves = [(OPEN_STATES, keys.open_runs), (ENDED_STATES, keys.ended_runs)]
        names = [
            key_of(partition, self._wanted.tenant or "")
            for states, key_of in halves
            if not self._wanted.states.isdisjoint(states)
            for partition in range(keys.partitions)
        ]
        self._page = self._share(len(names))
        return [
            IndexReader(name, newest_first=self._newest_first, after=self._after, until_ms=until_ms) for name in names
        ]

    @property
    def _most(self) -> int:
        """How many places to look at next."""
        return BATCH if self._limit is None or not self._wanted.wants_all else max(1, min(BATCH, self._limit))

    def _share(self, sources: int) -> int:
        """Members to read from each set: its share of what is wanted, and half as many again, for no set has exactly
        its share.
        """
        if not self._wanted.wants_all:
            return max(LEAST_PAGE, ONE_READ // sources)
        wanted = BATCH if self._limit is None else min(self._limit, BATCH)
        return max(LEAST_PAGE, wanted * 3 // (2 * sources) + 1)


class ArchiveSource:
    """The archive as one more set of the list: `found` and `exhausted` are those of `IndexReader`."""

    def __init__(
        self, archive: Archive, tenant: str | None, after: Position | None, until_ms: int | None, *, newest_first: bool
    ) -> None:
        self._archive = archive
        self._tenant = tenant
        self._from = after
        self._since_ms = 0
        self._until_ms = until_ms
        if after and newest_first:
            self._until_ms = after.at_ms if until_ms is None else min(until_ms, after.at_ms)
        elif after:
            self._since_ms = after.at_ms
        self._newest_first = newest_first
        self._next: str | None = None
        self.infos: dict[Position, RunInfo] = {}
        self.found: list[Position] = []
        """What was read and not used, the next one last."""
        self.exhausted = False

    async def fill(self) -> None:
        """Read the next page if the last one is used up. Raises BlobError."""
        while not (self.found or self.exhausted):
            page = await self._archive.page(
                tenant=self._tenant,
                since_ms=self._since_ms,
                until_ms=self._until_ms,
                limit=BATCH,
                oldest_first=not self._newest_first,
                after=self._next,
            )
            self._next, self.exhausted = page.next, page.next is None
            infos = {Position(info.at_ms, info.run): info for info in page.runs}
            fresh = [place for place in infos if self._from is None or self._is_after(place, self._from)]
            self.infos = {place: infos[place] for place in fresh}
            self.found = fresh[::-1]

    def used(self, places: Sequence[Position]) -> None:
        """These were looked at, so nothing about them is kept."""
        for place in places:
            self.infos.pop(place, None)

    def _is_after(self, place: Position, start: Position) -> bool:
        return place < start if self._newest_first else place > start


def _drop_repeated(sources: list[IndexReader]) -> None:
    """Drop what was found twice because it ended between the reads of the two sets."""
    times: dict[str, int] = {}
    for source in sources:
        for place in source.found:
            times[place.run] = max(times.get(place.run, 0), place.at_ms)
    for source in sources:
        source.found = [place for place in source.found if times[place.run] == place.at_ms]


async def list_runs(
    deployment: Deployment,
    wanted: RunFilter,
    *,
    newest_first: bool,
    limit: int | None,
    archived: bool = False,
) -> AsyncGenerator[RunInfo]:
    lister = RunLister(deployment, wanted, newest_first=newest_first, limit=limit, archived=archived)
    left = limit
    while not lister.ended and left != 0:
        for _, info in await lister.next():
            yield info
            if left is not None:
                left -= 1
                if left == 0:
                    return


async def describe_runs(deployment: Deployment, runs: Sequence[str]) -> dict[str, RunInfo]:
    keys = await deployment.keys()
    await deployment.refresh()
    async with deployment.hub.reads:
        with translated(deployment.server):
            found = await read_runs(deployment.server.client, keys, runs)
    return {info.run: info for info in found if info}
