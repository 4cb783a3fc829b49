"""`GET /runs`: a page of the runs that a caller may see, the newest first, at a bounded cost."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from tokenbus import RunInfo
from tokenbus.bus.run_index import Position
from tokenbus.client.deployment import Deployment
from tokenbus.client.run_list import RunFilter, RunLister, run_filter
from tokenbus.core.nearest_name import unknown_name
from tokenbus_services.gateway.callers import Caller
from tokenbus_services.gateway.problem import invalid
from tokenbus_services.gateway.surfaces.fields import is_whole

MOST_RUNS = 200
"""Runs in one page."""
MOST_READS = 10
"""Pages of the index read for one answer: a filter that matches little gets a page that is not full."""
_DEFAULT_LIMIT = 50
_CURSOR = re.compile(r"([0-9]{1,16})-(.+)", re.ASCII | re.DOTALL)
_REPEATABLE = {"state"}
_ONCE = {"tenant", "provider", "older_than", "prefix", "limit", "after", "oldest_first"}


class RunPage(msgspec.Struct, frozen=True, kw_only=True):
    """The answer."""

    runs: list[RunInfo]
    next: str | None = None
    """Value of ``after`` for the next page; None at the end. A page that is not full may have it too."""


class RunQuery(msgspec.Struct, frozen=True, kw_only=True):
    """What the URL asks for."""

    wanted: RunFilter
    limit: int
    after: Position | None
    newest_first: bool

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
            limit=_limit(once.get("limit")),
            after=_position(once.get("after")),
            newest_first=not _flag("oldest_first", once.get("oldest_first", "false")),
        )


async def page_of(deployment: Deployment, query: RunQuery, caller: Caller) -> RunPage:
    """The next runs of the list that the caller may see. Raises ServerUnavailable."""
    wanted = query.wanted
    if not caller.operator:
        if wanted.tenant not in (None, caller.tenant):
            return RunPage(runs=[])  # as if that tenant had none
        wanted = msgspec.structs.replace(wanted, tenant=caller.tenant or None)
    lister = RunLister(deployment, wanted, after=query.after, newest_first=query.newest_first, limit=query.limit)
    found: list[RunInfo] = []
    for _ in range(MOST_READS):
        for place, info in await lister.next():
            if caller.owns(info.tenant or ""):
                found.append(info)
                if len(found) == query.limit:
                    return RunPage(runs=found, next=_cursor(place))
        if lister.ended:
            return RunPage(runs=found)
    assert lister.position
    return RunPage(runs=found, next=_cursor(lister.position))


def _filter(states: Sequence[str], once: dict[str, str]) -> RunFilter:
    arguments: dict[str, Any] = {name: once.get(name) for name in ("tenant", "provider", "prefix")}
    try:
        older_than = float(once["older_than"]) if "older_than" in once else None
    except ValueError:
        raise invalid("older_than", "must be a number of seconds") from None
    try:
        return run_filter(state=states or None, older_than=older_than, **arguments)  # pyright: ignore[reportArgumentType] - it checks them
    except ValueError as e:
        name, _, problem = str(e).partition(": ")
        raise invalid(name, problem) from None


def _limit(given: str | None) -> int:
    if given is None:
        return _DEFAULT_LIMIT
    if not (is_whole(given) and 1 <= int(given) <= MOST_RUNS):
        raise invalid("limit", f"must be a whole number from 1 to {MOST_RUNS}")
    return int(given)


def _flag(name: str, given: str) -> bool:
    if given not in ("true", "false"):
        raise invalid(name, "must be true or false")
    return given == "true"


def _position(given: str | None) -> Position | None:
    if given is None:
        return None
    if not (found := _CURSOR.fullmatch(given)):
        raise invalid("after", "must be 'next' of an earlier answer")
    return Position(int(found[1]), found[2])


def _cursor(place: Position) -> str:
    return f"{place.at_ms}-{place.run}"
