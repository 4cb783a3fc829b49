"""Reads of the index of runs: two sorted sets a partition, and the summary in each run's hash.

Scripts write the index (`accept`, `Commit.end_run`). The index may list a run whose hash has expired; readers leave it
out.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from tokenbus.bus import run_record as fields
from tokenbus.bus.keys import Keys
from tokenbus.bus.run_record import ENDED, UNENDED, status_of
from tokenbus.bus.server.error_replies import is_alien
from tokenbus.events.child_runs import parent_call
from tokenbus.events.run_info import ListedState, RunInfo

COMMANDS = 1000
"""Maximum commands per pipeline, so that none holds up the server's other clients for long."""
_FIELDS = (
    fields.STATUS,
    fields.ACCEPTED,
    fields.PROVIDER,
    fields.MODEL,
    fields.TENANT,
    fields.TURN,
    fields.ATTEMPT,
    fields.SEQ,
    fields.RAW,
    fields.DEADLINE,
    fields.ENDED_AT,
    fields.FINISH,
    fields.ERROR,
    fields.JUDGING,
    fields.WAITS,
)


class Summary(msgspec.Struct, frozen=True):
    """The small fields of a run's hash: its line in a list, and the data that only the console shows."""

    info: RunInfo
    judging_ms: int | None
    """Since when output of the run waits for its policies; None if none does."""


class Position(msgspec.Struct, frozen=True, order=True):
    """A place in the list of runs, which is in the order of time and then of ids."""

    at_ms: int
    run: str


class Source(Protocol):
    """Places in the order of the list, as far as they were read."""

    found: list[Position]
    """What was read and not used, the next one last."""
    exhausted: bool


class IndexReader:
    """Reads one sorted set in pages, in the order of time."""

    def __init__(self, key: str, *, newest_first: bool, after: Position | None, until_ms: int | None) -> None:
        """``after``: begin after this position. ``until_ms``: only runs from this time or earlier."""
        self._key = key
        self._newest_first = newest_first
        self._after = after
        self._until_ms = until_ms
        self._ties = 0
        """Members read before that have the time of ``after``: they come again with the next page."""
        self.found: list[Position] = []
        """What was read and not used, the next one last."""
        self.exhausted = False

    def ask(self, pipe: Any, count: int) -> None:
        """Add the read of the next page to a pipeline."""
        self._requested = count + self._ties
        start = self._after.at_ms if self._after else None
        if self._newest_first:
            most = min((ms for ms in (start, self._until_ms) if ms is not None), default="+inf")
            pipe.zrevrangebyscore(self._key, most, "-inf", start=0, num=self._requested, withscores=True)
        else:
            least = "-inf" if start is None else start
            most = "+inf" if self._until_ms is None else self._until_ms
            pipe.zrangebyscore(self._key, least, most, start=0, num=self._requested, withscores=True)

    def take(self, reply: Sequence[tuple[bytes, float]]) -> None:
        """Take in the answer to `ask`."""
        self.exhausted = len(reply) < self._requested
        page = [Position(int(score), run.decode()) for run, score in reply]
        fresh = [place for place in page if self._is_new(place)]
        if page:
            self._ties = sum(place.at_ms == page[-1].at_ms for place in page)
            self._after = page[-1] if not self._after or fresh else self._after
        self.found = fresh[::-1]

    def _is_new(self, place: Position) -> bool:
        if self._after is None:
            return True
        return place < self._after if self._newest_first else place > self._after


async def fill(client: Any, sources: Sequence[IndexReader], page: int) -> None:
    """Read the next page of each set whose last page is used up. Raises redis-py's errors."""
    while empty := [source for source in sources if not source.found and not source.exhausted]:
        for at in range(0, len(empty), COMMANDS):
            some = empty[at : at + COMMANDS]
            pipe = client.pipeline(transaction=False)
            for source in some:
                source.ask(pipe, page)
            for source, reply in zip(some, await pipe.execute(), strict=True):
                source.take(reply)


def merged(sources: Sequence[Source], most: int, *, newest_first: bool) -> list[tuple[int, Position]]:
    """The next places of all sets in order, each with the number of its set, as far as the pages read so far determine
    it; at most so many.
    """
    sign = -1 if newest_first else 1
    heads = [(_Key(source.found[-1], sign), n) for n, source in enumerate(sources) if source.found]
    heapq.heapify(heads)
    places: list[tuple[int, Position]] = []
    while heads and len(places) < most:
        _, n = heads[0]
        source = sources[n]
        places.append((n, source.found.pop()))
        if source.found:
            heapq.heapreplace(heads, (_Key(source.found[-1], sign), n))
        elif source.exhausted:
            heapq.heappop(heads)
        else:
            break
    return places


class _Key:
    """Orders places for the heap, the newest first if ``sign`` is -1."""

    __slots__ = ("_place", "_sign")

    def __init__(self, place: Position, sign: int) -> None:
        self._place = place
        self._sign = sign

    def __lt__(self, other: _Key) -> bool:
        return self._place < other._place if self._sign > 0 else other._place < self._place


async def read_runs(client: Any, keys: Keys, runs: Sequence[str]) -> list[RunInfo | None]:
    """The summaries of these runs, see `read_summaries`. Raises redis-py's errors."""
    return [summary and summary.info for summary in await read_summaries(client, keys, runs)]


async def read_summaries(client: Any, keys: Keys, runs: Sequence[str]) -> list[Summary | None]:
    """The summaries of these runs, at the cost of one small read a run; None for a run that is unknown or has expired.

    Raises redis-py's errors.
    """
    found: list[Summary | None] = []
    for at in range(0, len(runs), COMMANDS):
        some = runs[at : at + COMMANDS]
        pipe = client.pipeline(transaction=False)
        located = [(run, keys.places(run)) for run in some]  # other tasks may note a run's partition meanwhile
        for run, partitions in located:
            for partition in partitions:
                pipe.hmget(keys.within(partition).run(run), _FIELDS)
        replies = iter(await pipe.execute(raise_on_error=False))
        for run, partitions in located:
            known = [(place, summary) for place in partitions if (summary := _summary(run, next(replies)))]
            if known:
                keys.note(run, known[0][0])
            found.append(known[0][1] if known else None)
    return found


def _summary(run: str, values: Any) -> Summary | None:
    if isinstance(values, Exception):
        if is_alien(values):
            return None
        raise values
    (
        status,
        accepted,
        provider,
        model,
        tenant,
        turn,
        attempt,
        seq,
        raw,
        deadline,
        ended,
        finish,
        error,
        judging,
        waits,
    ) = values
    state = _state(status, attempt, raw, waits)
    accepted = accepted or ended  # of a run whose hash was lost, its end is known alone
    if state is None or accepted is None:
        return None
    info = RunInfo(
        run=run,
        state=state,
        accepted_ms=int(accepted),
        provider=_text(provider),
        model=_text(model),
        tenant=_text(tenant),
        parent=above[0] if (above := parent_call(run)) else None,
        turn=int(turn or 0),
        attempt=int(attempt or 1),
        events=int(seq or 0),
        deadline_ms=int(deadline) if deadline else None,
        ended_ms=int(ended) if ended else None,
        finish=_text(finish),
        error=_text(error),
    )
    return Summary(info, int(judging or 0) or None)


def _state(status: bytes | None, attempt: bytes | None, raw: bytes | None, waits: bytes | None) -> ListedState | None:
    known = status_of(status)
    if known in UNENDED:
        if waits:
            return "waiting"
        return "queued" if attempt == b"1" and raw == b"0" else "running"
    return known if known in ENDED else None  # pyright: ignore[reportReturnType] - ENDED are these four states


def _text(value: bytes | None) -> str | None:
    return value.decode(errors="replace") if value else None
