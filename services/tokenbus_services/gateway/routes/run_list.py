"""`GET /runs`: a page of the runs that a caller may see, the newest first, at a bounded cost."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import Any, Generic, TypeVar

import msgspec

from tokenbus import RunInfo
from tokenbus.bus.run_index import Position
from tokenbus.client.deployment import Deployment
from tokenbus.client.run_list import RunFilter, RunLister, run_filter, seconds_of
from tokenbus.core.nearest_name import unknown_name
from tokenbus_services.gateway.callers import Caller
from tokenbus_services.gateway.problem import invalid
from tokenbus_services.gateway.surfaces.fields import is_whole

T = TypeVar("T")
Info = TypeVar("Info")
MOST_LISTED = 200
"""Runs or sessions in one page."""
MOST_READS = 10
"""Pages of the index read for one answer: a filter that matches little gets a page that is not full."""
_DEFAULT_LIMIT = 50
_CURSOR = re.compile(r"([0-9]{1,16})-(.+)", re.ASCII | re.DOTALL)
_REPEATABLE = {"state"}
_ONCE = {"tenant", "provider", "older_than", "prefix", "limit", "after", "oldest_first", "archived"}


class RunPage(msgspec.Struct, frozen=True, kw_only=True):
    runs: list[RunInfo]
    next: str | None = None
    """Value of ``after`` for the next page; None at the end. A page that is not full may have it too."""


class RunQuery(msgspec.Struct, frozen=True, kw_only=True):
    """What the URL asks for."""

    wanted: RunFilter
    limit: int
    after: Position | None
    newest_first: bool
    archived: bool

    @classmethod
    def of(cls, parameters: Iterable[tuple[str, str]]) -> RunQuery:
        """Read the parameters of the URL. Raises Refusal (400) that names the one that is wrong."""
        states, once = list[str](), dict[str, str]()
        for name, value in parameters:
            if name in _REPEATABLE:
                states += value.split(",")
            elif name not in _ONCE:
                raise invalid(name, unknown_name(name, sorted(_REPEATABLE | _ONCE)))
            elif name in once:
                raise invalid(name, "given more than once")
            else:
                once[name] = value
        return cls(
            wanted=_filter(states, once),
            limit=limit_in(once.get("limit")),
            after=position_in(once.get("after")),
            newest_first=not flag_in("oldest_first", once.get("oldest_first", "false")),
            archived=flag_in("archived", once.get("archived", "false")),
        )


async def page_of(deployment: Deployment, query: RunQuery, caller: Caller) -> RunPage:
    """The next runs of the list that the caller may see. Raises ServerUnavailable."""
    wanted = query.wanted
    if not caller.operator:
        if wanted.tenant not in (None, caller.tenant):
            return RunPage(runs=[])  # as if that tenant had none
        wanted = msgspec.structs.replace(wanted, tenant=caller.tenant or None)
    lister = RunLister(
        deployment,
        wanted,
        after=query.after,
        newest_first=query.newest_first,
        limit=query.limit,
        archived=query.archived,
    )
    found: list[RunInfo] = []
    for _ in range(MOST_READS):
        for place, info in await lister.next():
            if caller.owns(info.tenant or ""):
                found.append(info)
                if len(found) == query.limit:
                    return RunPage(runs=found, next=position_text(place))
        if lister.ended:
            return RunPage(runs=found)
    assert lister.position
    return RunPage(runs=found, next=position_text(lister.position))


class ListPage(Generic[T]):
    """One page of a list that is read from an index: the reader puts into ``found`` what belongs there."""

    def __init__(self, limit: int) -> None:
        self.found: list[T] = []
        self.next: str | None = None
        """Value of ``after`` for the next page; None at the end."""
        self._limit = limit

    async def of(self, listed: AsyncGenerator[tuple[Position, Info | None]]) -> AsyncGenerator[Info]:
        """What is listed, until the page is full or `MOST_READS` pages of the index (None) were read."""
        reads = 0
        async with aclosing(listed):
            async for place, info in listed:
                if info is None:
                    reads += 1
                else:
                    yield info
                if len(self.found) == self._limit or reads == MOST_READS:
                    self.next = position_text(place)
                    return


def _filter(states: Sequence[str], once: dict[str, str]) -> RunFilter:
    arguments: dict[str, Any] = {name: once.get(name) for name in ("tenant", "provider", "prefix")}
    older_than = age_in(once.get("older_than"))
    try:
        return run_filter(state=states or None, older_than=older_than, **arguments)  # pyright: ignore[reportArgumentType] - it checks them
    except ValueError as e:
        name, _, problem = str(e).partition(": ")
        raise invalid(name, problem) from None


def age_in(given: str | None) -> float | None:
    """Seconds in a URL. Raises Refusal, as those below do."""
    try:
        return seconds_of(None if given is None else float(given))
    except ValueError:
        raise invalid("older_than", "must be a number of seconds from 0") from None


def limit_in(given: str | None) -> int:
    """How many in one page."""
    if given is None:
        return _DEFAULT_LIMIT
    if not (is_whole(given) and 1 <= int(given) <= MOST_LISTED):
        raise invalid("limit", f"must be a whole number from 1 to {MOST_LISTED}")
    return int(given)


def flag_in(name: str, given: str) -> bool:
    """A truth value."""
    if given not in ("true", "false"):
        raise invalid(name, "must be true or false")
    return given == "true"


def position_in(given: str | None) -> Position | None:
    """What `position_text` wrote."""
    if given is None:
        return None
    if not (found := _CURSOR.fullmatch(given)):
        raise invalid("after", "must be 'next' of an earlier answer")
    return Position(int(found[1]), found[2])


def position_text(place: Position) -> str:
    """A place in a list, for ``after``."""
    return f"{place.at_ms}-{place.run}"
