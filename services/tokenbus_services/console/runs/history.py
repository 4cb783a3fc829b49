"""Finds runs by what was asked, what was answered and who they were for: all that the bus lists, the newest first, and
then those that only their records tell. Runs of the archive are listed at their places.

The index has none of that, so each candidate's request, and the end of its log for words, are read: some hundred runs
for one answer, and the rest with the next.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, cast

import msgspec

from tokenbus.bus.keys import Keys
from tokenbus.bus.run_index import Position
from tokenbus.bus.run_record import REQUEST
from tokenbus.bus.server.server import Server, translated
from tokenbus.client.decode import public_event
from tokenbus.client.deployment import Deployment
from tokenbus.client.run_list import RunFilter, RunLister, StateFilter, run_filter
from tokenbus.errors import Malformed
from tokenbus.events.public import BlockComplete, PublicEvent, RunEnd, Started
from tokenbus.events.run_info import RunInfo
from tokenbus_services.console.access.session import Viewer
from tokenbus_services.console.runs.recorded import RecordedRun, RecordedRuns
from tokenbus_services.console.runs.run_view import Costs, usage_shown
from tokenbus_services.gateway.archived_runs import ArchivedRuns
from tokenbus_services.gateway.problem import invalid
from tokenbus_services.gateway.routes.run_list import MOST_READS, position_in, position_text

PAGE = 50
MOST_SEARCHED = 500
"""Runs whose content is looked at for one answer."""
MOST_RECORDS = 100
"""Records that are read for one answer."""
MOST_ARCHIVED_EVENTS = 10_000
"""Of an archived run that are searched for words."""
AT_ONCE = 16
MOST_REQUEST_BYTES = 256 * 1024
"""A longer request is neither searched nor shown in the list."""
_OF_RECORDS = "records-"
_LAST_EVENTS = 64
_BEGINS = 160
_MAX_TEXT = 200


class HistoryQuery(msgspec.Struct, frozen=True, kw_only=True):
    """What is looked for."""

    listed: RunFilter
    q: str = ""
    """Text in id, model, provider, finish or error code."""
    error: str = ""
    finish: str = ""
    since_ms: int = 0
    until_ms: int | None = None
    words: tuple[str, ...] = ()
    """All of them, anywhere in the request or in the answer's last blocks; in lower case."""
    metadata: Mapping[str, str] = {}
    content: bool = False

    def wants(self, info: RunInfo) -> bool:
        """Whether the summary passes, apart from what `listed` checks."""
        text = (info.run, info.tenant, info.provider, info.model, info.finish, info.error)
        return (
            (not self.error or info.error == self.error)
            and (not self.finish or info.finish == self.finish)
            and (not self.q or self.q in "\n".join(part for part in text if part).lower())
        )

    def is_early(self, info: RunInfo) -> bool:
        """Whether it had ended by the time that is asked for."""
        return self.until_ms is None or info.at_ms <= self.until_ms


class HistoryRow(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the history."""

    info: RunInfo
    cost: float | None
    usage: dict[str, Any] | None
    begins: str | None
    """The beginning of the last message of its user; like `metadata`, None for viewers who may not see content."""
    metadata: dict[str, Any] | None


class HistoryPage(msgspec.Struct, frozen=True, kw_only=True):
    rows: list[HistoryRow]
    next: str | None
    """Of the next page; None at the end."""
    back_to_ms: int | None
    """How far back this page has looked."""
    now: int


def query_of(query: Mapping[str, str], viewer: Viewer, now_ms: int) -> HistoryQuery:
    """The query of a page. Raises Refusal (400, 403)."""
    given = {name: query.get(name, "")[:_MAX_TEXT].strip() for name in ("q", "words", "metadata", "error", "finish")}
    content = viewer.may("see_content")
    if (given["words"] or given["metadata"]) and not content:
        viewer.require("see_content")
    name, sign, value = given["metadata"].partition("=")
    if given["metadata"] and not (sign and name.strip()):
        raise invalid("metadata", "must be NAME=VALUE")
    until = _time(query, "until")
    try:
        listed = run_filter(
            state=cast("StateFilter | None", query.get("state") or None),
            tenant=(viewer.tenant if viewer.tenant is not None else query.get("tenant")) or None,
            provider=query.get("provider") or None,
            older_than=None if until is None else max(0.0, (now_ms - until) / 1000),
        )
    except ValueError as e:
        raise invalid(None, str(e)) from None
    return HistoryQuery(
        listed=listed,
        q=given["q"].lower(),
        error=given["error"],
        finish=given["finish"],
        since_ms=_time(query, "since") or 0,
        until_ms=until,
        words=tuple(given["words"].casefold().split()),
        metadata={name.strip(): value.strip()} if sign else {},
        content=content,
    )


def _time(query: Mapping[str, str], name: str) -> int | None:
    text = query.get(name, "")
    if text and not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise invalid(name, "must be a Unix time in ms")
    return int(text) if text else None


class _Asked(msgspec.Struct):
    """What a row shows of a request."""

    messages: list[dict[str, Any]] = []
    metadata: dict[str, Any] | None = None


_request = msgspec.json.Decoder(_Asked)


class _Content(msgspec.Struct):
    """What was read of one candidate."""

    asked: _Asked
    end: RunEnd | None
    text: str
    """In lower case; empty unless words are looked for."""


class History:
    """Reads pages of the history."""

    def __init__(
        self,
        server: Server,
        deployment: Deployment,
        *,
        archived: ArchivedRuns,
        recorded: RecordedRuns,
        costs: Costs,
    ) -> None:
        self._server = server
        self._archived = archived
        self._recorded = recorded
        self._deployment = deployment
        self._costs = costs

    async def page(self, query: HistoryQuery, after: str | None) -> HistoryPage:
        """The next runs that pass: those that the bus lists, then those that only records tell.

        Raises Refusal (400) for an ``after`` that no page gave; ServerUnavailable.
        """
        in_records = after is not None and after.startswith(_OF_RECORDS)
        place = position_in(after.removeprefix(_OF_RECORDS) or None if after else None)
        rows: list[HistoryRow] = []
        if not in_records:
            page = await self._listed(query, place, rows)
            if page is not None:
                return page
            place = None
        return await self._recorded_rows(query, place, rows)

    async def _listed(self, query: HistoryQuery, place: Position | None, rows: list[HistoryRow]) -> HistoryPage | None:
        """Fill ``rows`` with what the bus lists; None at its end."""
        lister = RunLister(self._deployment, query.listed, after=place, archived=True)
        looked_at = 0
        for _ in range(MOST_READS):
            candidates = await lister.next()
            keys = await self._deployment.keys()
            for at in range(0, len(candidates), AT_ONCE):
                some = candidates[at : at + AT_ONCE]
                wanted = [(one, info) for one, info in some if one.at_ms >= query.since_ms and query.wants(info)]
                found = await self._contents(keys, [info.run for _, info in wanted], words=bool(query.words))
                for (one, info), content in zip(wanted, found, strict=True):
                    if _passes(query, content):
                        rows.append(self._row(info, content, content_shown=query.content))
                        if len(rows) == PAGE:
                            return self._page(rows, position_text(one), one)
                place = some[-1][0]
                looked_at += len(wanted)
                if place.at_ms < query.since_ms:
                    return None
                if looked_at >= MOST_SEARCHED:
                    return self._page(rows, position_text(place), place)
            if lister.ended:
                return None
            place = lister.position or place
        return self._page(rows, position_text(place) if place else None, place)

    async def _recorded_rows(self, query: HistoryQuery, after: Position | None, rows: list[HistoryRow]) -> HistoryPage:
        place, looked_at = after, 0
        async with aclosing(self._recorded.list(query.listed.tenant, after)) as found:
            async for at, recorded in found:
                if at.at_ms < query.since_ms:
                    break
                place = at
                looked_at += 1
                if await self._archived.info(recorded.info.run):
                    continue  # listed at its place
                info = recorded.info
                content = _content_of(recorded, words=bool(query.words))
                if query.listed.wants(info) and query.wants(info) and query.is_early(info) and _passes(query, content):
                    rows.append(self._row(info, content, content_shown=query.content))
                if len(rows) >= PAGE or looked_at == MOST_RECORDS:
                    return self._page(rows, _OF_RECORDS + position_text(at), at)
        return self._page(rows, None, place)

    def _page(self, rows: list[HistoryRow], after: str | None, place: Position | None) -> HistoryPage:
        return HistoryPage(
            rows=rows,
            next=after,
            back_to_ms=place.at_ms if place else None,
            now=self._server.clock.now_ms(),
        )

    async def _contents(self, keys: Keys, runs: Sequence[str], *, words: bool) -> list[_Content]:
        """What was asked, how it ended, and for words the text; empty for what has expired meanwhile."""
        if not runs:
            return []
        client = self._server.client
        pipe = client.pipeline(transaction=False)
        for run in runs:
            pipe.hstrlen(keys.run(run), REQUEST)
            pipe.xrevrange(keys.log(run), count=_LAST_EVENTS if words else 1)
        with translated(self._server):
            replies: list[Any] = await pipe.execute()
            small = [run for run, size in zip(runs, replies[0::2], strict=True) if 0 < size <= MOST_REQUEST_BYTES]
            pipe = client.pipeline(transaction=False)
            for run in small:
                pipe.hget(keys.run(run), REQUEST)
            asked = dict(zip(small, await pipe.execute() if small else [], strict=True))
        found = [_content(run, asked.get(run), log, words=words) for run, log in zip(runs, replies[1::2], strict=True)]
        gone = [
            at for at, (size, log) in enumerate(zip(replies[0::2], replies[1::2], strict=True)) if not (size or log)
        ]
        for at in gone:
            found[at] = await self._of_archive(runs[at], words=words)
        return found

    async def _of_archive(self, run: str, *, words: bool) -> _Content:
        """What the archive has of a run: its log, and no request."""
        if words:
            events = [event async for event in _first(self._archived.events(run))]
        else:
            events = [
                event
                for event in (await self._archived.first_event(run), await self._archived.last_event(run))
                if event
            ]
        first, last = (events[0], events[-1]) if events else (None, None)
        request = _Asked(metadata=first.metadata if isinstance(first, Started) else None)
        return _Content(
            request, last if isinstance(last, RunEnd) else None, _searched(request, events) if words else ""
        )

    def _row(self, info: RunInfo, content: _Content, *, content_shown: bool) -> HistoryRow:
        end = content.end
        usage = end.usage if end else None
        return HistoryRow(
            info=info,
            cost=self._costs.cost(usage, info.provider, [end.model if end else None, info.model]),
            usage=usage_shown(usage),
            begins=_begins(content.asked) if content_shown else None,
            metadata=content.asked.metadata if content_shown else None,
        )


async def _first(events: AsyncGenerator[PublicEvent]) -> AsyncGenerator[PublicEvent]:
    """The events, but of a very long log only its beginning."""
    async with aclosing(events):
        left = MOST_ARCHIVED_EVENTS
        async for event in events:
            yield event
            left -= 1
            if not left:
                return


def _passes(query: HistoryQuery, content: _Content) -> bool:
    metadata = content.asked.metadata or {}
    if any(_text(metadata.get(name)) != value for name, value in query.metadata.items()):
        return False
    return all(word in content.text for word in query.words)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) or value is None else msgspec.json.encode(value).decode()


def _content(run: str, asked: bytes | None, log: list[Any], *, words: bool) -> _Content:
    events: list[PublicEvent] = []
    for entry in reversed(log):
        try:
            events.append(public_event(run, entry))
        except Malformed:
            continue
    try:
        request = _request.decode(asked) if asked else _Asked()
    except msgspec.MsgspecError:
        request = _Asked()
    end = events[-1] if events and isinstance(events[-1], RunEnd) else None
    return _Content(request, end, _searched(request, events) if words else "")


def _content_of(recorded: RecordedRun, *, words: bool) -> _Content:
    try:
        request = msgspec.convert(recorded.request, _Asked)
    except msgspec.ValidationError:
        request = _Asked()
    return _Content(request, recorded.end, _searched(request, recorded.events) if words else "")


def _searched(request: _Asked, events: Sequence[PublicEvent]) -> str:
    """What words are looked for in."""
    said = [text for event in events if isinstance(event, BlockComplete) for text in (event.content, event.arguments)]
    texts = [*(text for text in said if text), *_strings(request.messages), *_strings(request.metadata)]
    return "\n".join(texts).casefold()


def _strings(value: Any) -> list[str]:
    """All texts in a JSON value."""
    if isinstance(value, str):
        return [value]
    parts: list[Any] = []
    if isinstance(value, dict):
        parts = list(cast("dict[str, Any]", value).values())
    elif isinstance(value, list):
        parts = cast("list[Any]", value)
    return [text for part in parts for text in _strings(part)]


def _begins(asked: _Asked) -> str:
    last = next((one.get("content") for one in reversed(asked.messages) if one.get("role") == "user"), None)
    return " ".join(" ".join(_strings(last)).split())[:_BEGINS]
