"""All runs that a gateway's console knows, kept up to date at a cost that does not depend on their chunks.

One sample reads the index of open and ended runs, the summaries of runs that it does not know yet and of those that
are shown, and the newest few events of shown runs whose count of events has changed. Other runs are looked at in turn,
a few with each sample, so that counts by state are at most some seconds old.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, cast, get_args

import msgspec

from tokenbus.bus.keys import Keys
from tokenbus.bus.layout import locate
from tokenbus.bus.run_index import Summary, read_summaries
from tokenbus.bus.server.server import Server
from tokenbus.client.decode import public_event
from tokenbus.errors import Malformed
from tokenbus.events.frames import TurnWork
from tokenbus.events.public import Chunk, PublicEvent, RunEnd
from tokenbus.events.run_info import RunInfo
from tokenbus_services.console.access.session import Viewer
from tokenbus_services.console.health import LaneHealth
from tokenbus_services.console.runs.last_times import LastTimes
from tokenbus_services.console.runs.run_view import (
    CHARACTERS_PER_TOKEN,
    MAX_WORDS,
    Costs,
    Row,
    State,
    TurnQueue,
    end_of_text,
    state_after,
    usage_shown,
)
from tokenbus_services.gateway.problem import invalid

MAX_LANES = 100
MAX_OPEN = 5_000
"""Newest open runs that are listed; the others are only counted."""
MAX_ENDED = 400
MAX_ENDED_SHOWN = 100
NEW_PER_SAMPLE = 1_000
IN_TURN = 100
"""Runs that are not shown and are looked at with each sample."""
EVENTS_PER_SAMPLE = 800
"""Events of logs that one sample reads, over all runs; each run's share is between the next two."""
LEAST_EVENTS, MOST_EVENTS = 4, 24
FAILED_KEPT_MS = 600_000
QUIET_MS = 30_000
"""A run that has published nothing for so long is quiet, unless it waits for a person or a client."""
Sort = Literal["trouble", "newest", "longest"]
"""``trouble``: quiet runs first, those that are quiet for longest before others; then the newest."""
_WAITS = ("queued", "waiting")
_BAD = frozenset({"failed", "incomplete"})


class River(msgspec.Struct, frozen=True, kw_only=True):
    """One sample for one view."""

    at: int
    open: int
    states: dict[str, int]
    rows: list[Row]
    ended: list[Row]
    behind_ms: int


class RunTable:
    """The newest open and ended runs, and failures of the last minutes."""

    def __init__(self, server: Server, keys: Keys, costs: Costs, *, clock: Callable[[], float]) -> None:
        self._server = server
        self._keys = keys
        self._costs = costs
        self._clock = clock
        self._open: dict[str, KnownRun] = {}
        self._open_count = 0
        self._ended: dict[str, KnownRun] = {}
        self._in_turn: list[str] = []
        self._turns = TurnQueue(server, keys)
        self._last_times = LastTimes()

    def clear(self) -> None:
        self._open, self._ended, self._in_turn = {}, {}, []
        self._last_times = LastTimes()

    async def sample(self, views: Callable[[], Collection[PageView]]) -> None:
        """Read what changed. ``views``: those of the pages that are open now. Raises redis-py's errors."""
        await self._last_times.read(self._server, self._keys)
        open_ids, ended_ids = await self._listed()
        new = [run for run in open_ids if run not in self._open]
        new += [run for run in ended_ids if run not in self._ended]
        shown = self._shown(views())
        asked = list(dict.fromkeys([*new[:NEW_PER_SAMPLE], *shown, *self._next_in_turn()]))
        now, now_ms = self._clock(), self._server.clock.now_ms()
        for run, summary in zip(asked, await read_summaries(self._server.client, self._keys, asked), strict=True):
            known = self._open.get(run) or self._ended.get(run)
            if summary is None:
                self._open.pop(run, None)
                continue
            if known is None:
                known = KnownRun(summary)
                known.said_ms = self._last_times.of(summary.info, self._keys.partition_of(run), now_ms)
            known.update(summary, now, now_ms)
            if known.info.is_open:
                self._open[run] = known
            else:
                self._open.pop(run, None)
                self._ended[run] = known
        self._forget(set(open_ids), set(ended_ids))
        await self._look([*self._shown(views()), *(run for run in asked if run in self._open)])
        await self._look_for_waiting()

    def river(self, view: PageView, *, behind_ms: int = 0) -> River:
        """The newest sample for this view."""
        now_ms = self._server.clock.now_ms()
        states: Counter[str] = Counter()
        matching: list[KnownRun] = []
        for known in self._open_for(view):
            if view.matches(known, now_ms):
                state = known.state(now_ms)
                states[state] += 1
                if not view.state or state == view.state:
                    matching.append(known)
        ended: list[KnownRun] = []
        for known in self._newest_ended():
            if view.matches(known, now_ms):
                states[known.info.state] += 1
                if not view.state or known.info.state == view.state:
                    ended.append(known)
        shown = _shown_ended(ended)
        if view.sort == "longest":
            shown.sort(key=lambda known: known.info.accepted_ms - (known.info.ended_ms or 0))
        everything = view == PageView(limit=view.limit, content=view.content, sort=view.sort)
        return River(
            at=now_ms,
            open=max(self._open_count, len(matching)) if everything else len(matching),
            states=dict(states),
            rows=[known.row(now_ms, content=view.content) for known in matching[: view.limit]],
            ended=[known.row(now_ms, content=view.content) for known in shown],
            behind_ms=behind_ms,
        )

    def lanes(self) -> list[LaneHealth]:
        """How many runs of each tenant wait, the most first."""
        now_ms = self._server.clock.now_ms()
        waiting = Counter(known.info.tenant or "" for known in self._open.values() if known.state(now_ms) in _WAITS)
        return [LaneHealth(tenant=tenant, waiting=count) for tenant, count in waiting.most_common(MAX_LANES)]

    async def _listed(self) -> tuple[list[str], list[str]]:
        """Ids of the newest open and ended runs."""
        keys = self._keys
        share = -(-MAX_OPEN // keys.partitions)
        share_ended = max(8, -(-MAX_ENDED // keys.partitions))
        pipe = self._server.client.pipeline(transaction=False)
        for p in range(keys.partitions):
            pipe.zcard(keys.open_runs(p))
            pipe.zrevrangebyscore(keys.open_runs(p), "+inf", "-inf", start=0, num=share)
            pipe.zrevrangebyscore(keys.ended_runs(p), "+inf", "-inf", start=0, num=share_ended)
        replies: list[Any] = await pipe.execute()
        self._open_count = sum(replies[0::3])
        return _names(replies[1::3]), _names(replies[2::3])

    def _shown(self, views: Collection[PageView]) -> list[str]:
        """Ids of the open runs that these views show."""
        found: dict[str, None] = {}
        now_ms = self._server.clock.now_ms()
        for view in views:
            count = 0
            for known in self._open_for(view):
                if view.matches(known, now_ms) and (not view.state or known.state(now_ms) == view.state):
                    found[known.info.run] = None
                    count += 1
                    if count == view.limit:
                        break
        return list(found)

    def _next_in_turn(self) -> list[str]:
        if not self._in_turn:
            self._in_turn = list(self._open)
        taken, self._in_turn = self._in_turn[:IN_TURN], self._in_turn[IN_TURN:]
        return [run for run in taken if run in self._open]

    async def _look(self, runs: Iterable[str]) -> None:
        """Read the newest events of these open runs, and of the ended ones that are shown, if any."""
        open_runs = [self._open[run] for run in dict.fromkeys(runs) if run in self._open]
        ended = [known for known in _shown_ended(self._newest_ended()) if known.end is None]
        wanted = [known for known in (*open_runs, *ended) if known.needs_look]
        if not wanted:
            return
        count = max(LEAST_EVENTS, min(MOST_EVENTS, EVENTS_PER_SAMPLE // len(wanted)))
        await locate(self._server, self._keys, *(known.info.run for known in wanted))
        pipe = self._server.client.pipeline(transaction=False)
        for known in wanted:
            pipe.xrevrange(self._keys.log(known.info.run), count=count)
        replies: list[Any] = await pipe.execute(raise_on_error=False)
        for known, reply in zip(wanted, replies, strict=True):
            if isinstance(reply, list):
                known.look(_events(known.info.run, cast("list[Any]", reply)))
            if known.end:
                known.cost = self._costs.cost(known.end.usage, known.info.provider, [known.end.model, known.info.model])

    async def _look_for_waiting(self) -> None:
        """Find out which of the open runs that say nothing yet wait in front of their provider."""
        silent = {known.info.run: known.info.accepted_ms for known in self._open.values() if known.is_silent}
        waiting = await self._turns.waiting(silent)
        for run, known in self._open.items():
            known.waiting = waiting.get(run)

    def _forget(self, open_ids: set[str], ended_ids: set[str]) -> None:
        """Drop runs that are neither listed nor recent failures."""
        if self._open_count <= len(open_ids):
            for run in [run for run in self._open if run not in open_ids]:
                del self._open[run]
        since = self._server.clock.now_ms() - FAILED_KEPT_MS
        for run, known in list(self._ended.items()):
            recent_failure = known.info.state in _BAD and (known.info.ended_ms or 0) > since
            if run not in ended_ids and not recent_failure:
                del self._ended[run]

    def _open_for(self, view: PageView) -> list[KnownRun]:
        """All open runs, in the order of this view."""
        match view.sort:
            case "newest":
                return sorted(self._open.values(), key=lambda known: -known.info.accepted_ms)
            case "longest":
                return sorted(self._open.values(), key=lambda known: known.info.accepted_ms)
            case "trouble":
                return sorted(self._open.values(), key=_trouble)

    def _newest_ended(self) -> list[KnownRun]:
        return sorted(self._ended.values(), key=lambda known: -(known.info.ended_ms or 0))


def _trouble(known: KnownRun) -> tuple[bool, int]:
    return (False, known.said_ms) if known.quiet_ms is not None else (True, -known.info.accepted_ms)


def _shown_ended(newest: Sequence[KnownRun]) -> list[KnownRun]:
    """The newest, and failures that others have pushed out."""
    first, rest = newest[:MAX_ENDED_SHOWN], newest[MAX_ENDED_SHOWN:]
    return [*first, *[known for known in rest if known.info.state in _BAD][:MAX_ENDED_SHOWN]]


def _names(pages: Sequence[Sequence[bytes]]) -> list[str]:
    return [run.decode() for page in pages for run in page]


def _events(run: str, entries: list[Any]) -> list[PublicEvent]:
    found: list[PublicEvent] = []
    for entry in reversed(entries):
        try:
            found.append(public_event(run, entry))
        except Malformed:
            continue
    return found


# Which runs a page shows. Pure.

MAX_ROWS = 200
_MAX_TEXT = 200


class PageView(msgspec.Struct, frozen=True, kw_only=True):
    """What one page shows. Pages with equal views share their rows."""

    q: str = ""
    """Text in the run's id, tenant, provider, model, finish or error code; in lower case."""
    state: str = ""
    tenant: str = ""
    provider: str = ""
    error: str = ""
    finish: str = ""
    since_ms: int = 0
    """Shows what was open, or ended, at this time or later; like `until_ms` in Unix time."""
    until_ms: int | None = None
    """Shows what had begun by this time."""
    sort: Sort = "trouble"
    limit: int = MAX_ROWS
    scope: str | None = None
    """The viewer's tenant; None: sees all."""
    content: bool = False

    def matches(self, known: KnownRun, now_ms: int) -> bool:
        """Whether the page counts and shows this run."""
        info = known.info
        return (
            (self.scope is None or info.tenant == self.scope)
            and (not self.tenant or info.tenant == self.tenant)
            and (not self.provider or info.provider == self.provider)
            and (not self.error or info.error == self.error)
            and (not self.finish or info.finish == self.finish)
            and (info.ended_ms or now_ms) >= self.since_ms
            and (self.until_ms is None or info.accepted_ms <= self.until_ms)
            and (not self.q or self.q in known.text)
        )


def view_of(query: Mapping[str, str], viewer: Viewer) -> PageView:
    """The view of a page's query. Raises Refusal (400) for a wrong value."""
    names = ("q", "state", "tenant", "provider", "error", "finish")
    given = {name: query.get(name, "")[:_MAX_TEXT] for name in names}
    if given["state"] and given["state"] not in get_args(State):
        raise invalid("state", f"must be one of {', '.join(get_args(State))}")
    sort = query.get("sort") or "trouble"
    if sort not in get_args(Sort):
        raise invalid("sort", f"must be one of {', '.join(get_args(Sort))}")
    limit = _number(query, "limit", digits=5)
    given["q"] = given["q"].strip().lower()
    return PageView(
        **given,
        since_ms=_number(query, "since", digits=15) or 0,
        until_ms=_number(query, "until", digits=15),
        sort=cast("Sort", sort),
        limit=MAX_ROWS if limit is None else max(1, min(MAX_ROWS, limit)),
        scope=viewer.tenant,
        content=viewer.may("see_content"),
    )


def _number(query: Mapping[str, str], name: str, *, digits: int) -> int | None:
    text = query.get(name, "")
    if text and not (text.isascii() and text.isdigit() and len(text) <= digits):
        raise invalid(name, "must be a number")
    return int(text) if text else None


_RATE_S = 0.9
"""Shortest time over which a rate is measured."""
JUDGED_MS = 250
"""A run whose output waits for its policies for this long is shown as judged: most verdicts take less."""
_SMOOTH = 0.5
"""Share of the newest second in the shown rate."""


class KnownRun:
    """Grows as the sampler looks at it."""

    def __init__(self, summary: Summary) -> None:
        info = self.info = summary.info
        self._judging_ms = summary.judging_ms
        self.waiting: TurnWork | None = None
        """Its turn, if that waits in front of its provider."""
        self.text = _searched(info)
        """What a search looks at."""
        self.seq = -1
        """The newest event that was looked at."""
        self.said_ms = summary.info.accepted_ms
        """When it published something last, in Unix time, and when the console looked last:"""
        self._looked_ms = summary.info.accepted_ms
        self.end: RunEnd | None = None
        self.cost: float | None = None
        self._words = ""
        self._last_state: State | None = None
        """The state after its newest event, which was one of this attempt:"""
        self._last_attempt = 0
        self._chars = 0.0
        """Characters of an event, on average over those that were looked at last."""
        self._rate: float | None = None
        self._counted: tuple[float, int] | None = None
        """When the events were counted last, and how many there were."""

    @property
    def needs_look(self) -> bool:
        """Whether there are events that were not examined yet."""
        return self.info.events - 1 > self.seq

    @property
    def is_silent(self) -> bool:
        """Whether its current attempt has published nothing yet."""
        return self.info.is_open and (
            self._last_attempt < self.info.attempt or self._last_state in (None, "first_byte")
        )

    @property
    def quiet_ms(self) -> int | None:
        """For how long it had published nothing when the console looked last, if that is long for an open run."""
        quiet = self._looked_ms - self.said_ms
        return quiet if quiet >= QUIET_MS and self.info.is_open and self.info.state != "waiting" else None

    def update(self, summary: Summary, now: float, now_ms: int) -> None:
        """Take in a newer summary. ``now``: a monotonic time in seconds. ``now_ms``: the server's time."""
        info = summary.info
        self._looked_ms = now_ms
        if info.events != self.info.events:
            self.said_ms = now_ms
        self._judging_ms = summary.judging_ms
        self.text = _searched(info)
        self.info = info
        if self._counted is None:
            self._counted = (now, info.events)
        elif now - self._counted[0] >= _RATE_S:
            before, events = self._counted
            rate = max(0, info.events - events) / (now - before) * self._chars / CHARACTERS_PER_TOKEN
            self._rate = rate if self._rate is None else _SMOOTH * rate + (1 - _SMOOTH) * self._rate
            self._counted = (now, info.events)

    def look(self, events: Sequence[PublicEvent]) -> None:
        """Take in the newest events of its log, in order."""
        fresh = [event for event in events if event.seq > self.seq]
        if not fresh:
            return
        last_words = end_of_text(fresh)
        goes_on = fresh[0].seq == self.seq + 1
        if last_words:
            self._words = (self._words + last_words if goes_on and self._words else last_words)[-MAX_WORDS:]
        chunks = [len(event.text) for event in fresh if isinstance(event, Chunk)]
        if chunks:
            self._chars = sum(chunks) / len(fresh)
        for event in fresh:
            self._last_state = state_after(event) or self._last_state
        last = fresh[-1]
        self.seq = last.seq
        self._last_attempt = last.attempt
        if isinstance(last, RunEnd):
            self.end = last

    def state(self, now_ms: int) -> State:
        """What the run does at this time of the server's clock."""
        info = self.info
        if not info.is_open:
            return cast("State", info.state)
        if self._judging_ms and now_ms - self._judging_ms >= JUDGED_MS:
            return "judged"
        if not self.is_silent and self._last_state:
            return self._last_state
        turn = self.waiting
        if turn and turn.attempt >= info.attempt:
            return "retrying" if turn.not_before_ms > now_ms else "waiting"
        return "queued" if info.events == 0 else "first_byte"

    def row(self, now_ms: int, *, content: bool) -> Row:
        """The line of the river."""
        info = self.info
        usage = self.end.usage if self.end else None
        return Row(
            run=info.run,
            state=self.state(now_ms),
            tenant=info.tenant,
            provider=info.provider,
            model=info.model,
            started_at=info.accepted_ms,
            ended_at=info.ended_ms,
            finish=info.finish,
            error=info.error,
            turn=info.turn,
            attempt=info.attempt,
            tokens_per_s=round(self._rate, 1) if self._rate is not None and info.is_open else None,
            words=self._words if content else None,
            cost=self.cost,
            usage=usage_shown(usage),
            quiet_ms=self.quiet_ms,
        )


def _searched(info: RunInfo) -> str:
    parts = (info.run, info.tenant, info.provider, info.model, info.finish, info.error)
    return "\n".join(part for part in parts if part).lower()
