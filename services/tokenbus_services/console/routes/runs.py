"""Routes of one run: what it is, its events as they come, its decisions and blobs, and what may be done with it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from tokenbus.bus.keys import DATA_FIELD
from tokenbus.bus.run_index import Summary, read_summaries
from tokenbus.bus.run_record import CHOICE, CONTINUES, REQUEST, STATUS, UNENDED, status_of
from tokenbus.bus.server.server import translated
from tokenbus.client.decode import public_event
from tokenbus.client.rerun import MAX_AGAIN, How
from tokenbus.events import decisions
from tokenbus.events.public import TERMINAL, PublicEvent, blobs_of
from tokenbus.events.topics import as_written, type_of
from tokenbus_services.console.access.hiding import hidden
from tokenbus_services.console.access.session import PATH, Viewer
from tokenbus_services.console.http import SURFACE, Desk, body_of, json, refusal
from tokenbus_services.console.runs.history import History, query_of
from tokenbus_services.console.runs.recorded import RecordedRun, RecordedRuns
from tokenbus_services.console.runs.run_table import KnownRun
from tokenbus_services.console.runs.run_view import Costs, TurnQueue, attempts_of
from tokenbus_services.gateway.answers.answer import RunOfAnswer, StreamedAnswer
from tokenbus_services.gateway.problem import Problem, Refusal, invalid
from tokenbus_services.gateway.runs import not_found
from tokenbus_services.gateway.surfaces.contract import Encoder, encode_line

SAFE_IMAGES = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp", "image/avif"})
"""What a browser may show as it is; everything else is saved as a file."""
MAX_ATTEMPTS = 100
"""How many of a run's newest attempts are returned."""
MAX_DECISIONS = 500
ACCEPTED_S = 10.0
LOOK_S = 0.05
_LAST = 24
_MAX_SEQ = 2**64 - 1
_PAGE = 500
_MAX_LOOKED_AT = 20_000


def routes(desk: Desk, costs: Costs) -> list[BaseRoute]:
    parts = _RunRoutes(desk, costs)
    run = f"{PATH}/api/runs/{{run}}"
    return [
        Route(f"{PATH}/api/history", desk.view("see_runs", parts.history), methods=["GET"]),
        Route(run, desk.view("see_runs", parts.run, links=True), methods=["GET"]),
        Route(f"{run}/state", desk.view("see_runs", parts.state, links=True), methods=["GET"]),
        Route(f"{run}/events", desk.view("see_runs", parts.events, links=True), methods=["GET"]),
        Route(f"{run}/decisions", desk.view("see_content", parts.decisions, links=True), methods=["GET"]),
        Route(f"{run}/blobs/{{blob_id}}", desk.view("see_content", parts.blob, links=True), methods=["GET"]),
        Route(f"{run}/cancel", desk.action("act", parts.cancel), methods=["POST"]),
        Route(f"{run}/retry", desk.action("act", parts.retry), methods=["POST"]),
        Route(f"{run}/resume", desk.action("act", parts.resume), methods=["POST"]),
    ]


class _RunRoutes:
    def __init__(self, desk: Desk, costs: Costs) -> None:
        self._desk = desk
        self._costs = costs
        self._runs = desk.gateway.runs
        self._turns = TurnQueue(self._runs.server, self._runs.keys)
        self._recorded = RecordedRuns(self._runs.server, self._runs.keys, desk.gateway.blobs)
        self._history = History(
            self._runs.server,
            self._runs.deployment,
            archived=self._runs.archived,
            recorded=self._recorded,
            costs=costs,
        )

    async def history(self, request: Request, viewer: Viewer) -> Response:
        """A page of all runs that match, the newest first, however long ago they ended."""
        runs, given = self._runs, request.query_params
        query = query_of(given, viewer, runs.server.clock.now_ms())
        found = await self._history.page(query, given.get("after") or None)
        if query.words:
            self._desk.log("search", viewer)
        return json(found)

    async def run(self, request: Request, viewer: Viewer) -> Response:
        """What the run is: read from its summary and few of its events, however long it is."""
        run = await self._here(request, viewer)
        if isinstance(run, RecordedRun):
            return json(self._of_record(run, content=viewer.may("see_content")))
        server, key = self._runs.server, self._runs.keys.run(run)
        with translated(server, key):
            [summary] = await read_summaries(server.client, self._runs.keys, [run])
            fields = await server.client.hmget(key, [STATUS, REQUEST, CONTINUES, CHOICE])
        if summary is None:
            summary = await self._archived(run)
            events = await self._runs.archived.edges(run)
        else:
            events = await self._edges(run, summary.info.attempt)
        info = summary.info
        known = await self._known(summary, events[-_LAST:])
        if known.end:
            known.cost = self._costs.cost(known.end.usage, info.provider, [known.end.model, info.model])
        content = viewer.may("see_content")
        asked: bytes | None = fields[1]
        return json(
            {
                "row": known.row(server.clock.now_ms(), content=content),
                "request": msgspec.Raw(asked) if asked and content else None,
                "attempts": attempts_of(events, content=content),
                "last_seq": events[-1].seq if events else -1,
                "actions": _actions(*fields) if viewer.may("act") else [],
            }
        )

    async def state(self, request: Request, viewer: Viewer) -> Response:
        """What the run does now: for a page that shows it and gets no events from it."""
        run = await self._here(request, viewer)
        if isinstance(run, RecordedRun):
            return json({"state": run.info.state, "seq": run.info.events - 1})
        server, keys = self._runs.server, self._runs.keys
        with translated(server, keys.run(run)):
            [summary] = await read_summaries(server.client, keys, [run])
            newest: list[Any] = await server.client.xrevrange(keys.log(run), count=_LAST)
        events = [public_event(run, entry) for entry in reversed(newest)]
        if summary is None:
            summary, last = await self._archived(run), await self._runs.archived.last_event(run)
            events = [last] if last else []
        known = await self._known(summary, events)
        return json({"state": known.state(server.clock.now_ms()), "seq": known.seq})

    async def _here(self, request: Request, viewer: Viewer) -> str | RecordedRun:
        """The run of the path, or its record if the server has it no more. Raises Refusal (404)."""
        try:
            return await self._desk.run(request, viewer)
        except Refusal as e:
            if e.problem.status != 404:
                raise
            return await self._recorded.find(request.path_params["run"], viewer)

    def _of_record(self, recorded: RecordedRun, *, content: bool) -> dict[str, Any]:
        info, end = recorded.info, recorded.end
        known = KnownRun(Summary(info, None))
        known.look(recorded.events)
        known.cost = self._costs.cost(end.usage, info.provider, [end.model, info.model]) if end else None
        return {
            "row": known.row(self._runs.server.clock.now_ms(), content=content),
            "request": recorded.request if content else None,
            "attempts": attempts_of(recorded.events, content=content),
            "last_seq": info.events - 1,
            "actions": [],
            "recorded": True,
        }

    def _recorded_events(self, recorded: RecordedRun, after: int, viewer: Viewer) -> Response:
        content, left = viewer.may("see_content"), [event for event in recorded.events if event.seq > after]
        if not left:
            return Response(status_code=204)
        if content and after < 0:
            self._desk.log("read", viewer, run=recorded.info.run)
        lines = (event_lines(event, content=content, number=str(event.seq)) for event in left)
        return StreamingResponse(lines, media_type="text/event-stream; charset=utf-8")

    async def _archived(self, run: str) -> Summary:
        """The summary of a run that the archive alone has. Raises Refusal (404)."""
        if (info := await self._runs.archived.info(run)) is None:
            raise not_found(run)
        return Summary(info, None)

    async def _known(self, summary: Summary, newest: Sequence[PublicEvent]) -> KnownRun:
        known = KnownRun(summary)
        known.look(newest)
        if known.is_silent:
            info, server = summary.info, self._runs.server
            with translated(server):
                waiting = await self._turns.waiting({info.run: info.accepted_ms})
            known.waiting = waiting.get(info.run)
        return known

    async def _edges(self, run: str, attempts: int) -> list[PublicEvent]:
        """The first and last events of each attempt, and some more of the last one."""
        server, log_key = self._runs.server, self._runs.keys.log(run)
        pipe = server.client.pipeline(transaction=False)
        for attempt in range(max(1, attempts - MAX_ATTEMPTS + 1), attempts + 1):
            pipe.xrange(log_key, f"{attempt}-0", f"{attempt}-{_MAX_SEQ}", count=1)
            pipe.xrevrange(log_key, f"{attempt}-{_MAX_SEQ}", f"{attempt}-0", count=3)
        pipe.xrange(log_key, count=1)
        pipe.xrevrange(log_key, count=_LAST)
        with translated(server, log_key):
            pages: list[Any] = await pipe.execute()
        found = {event.seq: event for page in pages for event in (public_event(log_key, entry) for entry in page)}
        return [found[seq] for seq in sorted(found)]

    async def events(self, request: Request, viewer: Viewer) -> Any:
        run, after = await self._here(request, viewer), _after(request)
        if isinstance(run, RecordedRun):
            return self._recorded_events(run, after, viewer)
        last = await self._runs.last_event(run)
        if isinstance(last, TERMINAL) and last.seq <= after:
            return Response(status_code=204)
        content = viewer.may("see_content")
        if content and after < 0:
            self._desk.log("read", viewer, run=run)
        events, times = self._runs.follow(run, after=after), self._desk.gateway.times
        return StreamedAnswer(
            RunOfAnswer(run=run, events=events, refusal=refusal, times=times),
            encoder=lambda first: EventEncoder(content=content),
            media_type="text/event-stream; charset=utf-8",
            keep_alive=b": \n\n",
            early=False,
        )

    async def decisions(self, request: Request, viewer: Viewer) -> Response:
        run = await self._desk.run(request, viewer)
        server, keys = self._runs.server, self._runs.keys
        stream = keys.topic(keys.partition_of(run), "decisions")
        found: list[decisions.Decided] = []
        looked_at, end = 0, "+"
        while looked_at < _MAX_LOOKED_AT and len(found) < MAX_DECISIONS:
            with translated(server, stream):
                page: list[Any] = await server.client.xrevrange(stream, max=end, count=_PAGE)
            for _, fields in page:
                decision = _decision(fields)
                if decision and decision.run == run:
                    found.append(decision)
            looked_at += len(page)
            if len(page) < _PAGE:
                break
            end = f"({page[-1][0].decode()}"
        return json({"decisions": sorted(found, key=lambda one: one.n), "complete": looked_at < _MAX_LOOKED_AT})

    async def blob(self, request: Request, viewer: Viewer) -> Any:
        run = await self._here(request, viewer)
        blob_id = request.path_params["blob_id"]
        if isinstance(run, RecordedRun):
            if not any(blob_id in blobs_of(event) for event in run.events):
                raise not_found(run.info.run)
        elif not await self._runs.names_blob(run, blob_id):
            raise not_found(run)
        ref, chunks = await self._desk.gateway.blob(blob_id)
        safe = ref.media_type in SAFE_IMAGES
        headers = {
            "content-length": str(ref.size),
            "cache-control": "private, max-age=3600",
            "content-disposition": "inline" if safe else "attachment",
            "content-security-policy": "sandbox; default-src 'none'",
        }
        return StreamingResponse(
            chunks, headers=headers, media_type=ref.media_type if safe else "application/octet-stream"
        )

    async def cancel(self, request: Request, viewer: Viewer) -> Response:
        run = await self._desk.run(request, viewer)
        await body_of(request)
        await self._runs.cancel(run, "cancelled at the console")
        await self._desk.changed("cancel", viewer, run=run)
        return json({"run": run}, 202)

    async def retry(self, request: Request, viewer: Viewer) -> Response:
        return await self._again("retry", request, viewer)

    async def resume(self, request: Request, viewer: Viewer) -> Response:
        return await self._again("resume", request, viewer)

    async def _again(self, how: How, request: Request, viewer: Viewer) -> Response:
        run = await self._desk.run(request, viewer)
        again = (await body_of(request)).get("again", 1)
        if not isinstance(again, int) or isinstance(again, bool) or not 1 <= again <= MAX_AGAIN:
            raise invalid("again", f"must be a number from 1 to {MAX_AGAIN}")
        made = await self._runs.again(request.state.caller, SURFACE, run, how, again=again)
        try:
            await self._desk.changed(how, viewer, run=run, new_run=made.id)
            await self._until_accepted(made.id)
        finally:
            self._runs.leave(made)
        return json({"run": made.id}, 202)

    async def _until_accepted(self, run: str) -> None:
        """Wait until intake has created the run, because the page opens it next. Gives up if intake is unavailable."""
        server, keys = self._runs.server, self._runs.keys
        with suppress(TimeoutError):
            async with asyncio.timeout(ACCEPTED_S):
                while True:
                    with translated(server):
                        if (await read_summaries(server.client, keys, [run]))[0]:
                            return
                    await asyncio.sleep(LOOK_S)


class EventEncoder(Encoder):
    """A run's events, each with its seq as the id. Without ``content``, every text is replaced by its length."""

    def __init__(self, *, content: bool) -> None:
        self._content = content
        self._over = False

    def feed(self, event: PublicEvent) -> list[bytes]:
        if isinstance(event, TERMINAL):
            self._over = True
        return [event_lines(event, content=self._content, number=str(event.seq))]

    def broken(self, problem: Problem) -> list[bytes]:
        if self._over:
            return []
        self._over = True
        return [broken_line(problem)]


def event_lines(event: PublicEvent, *, content: bool, number: str) -> bytes:
    """The event as a page reads it, with its id."""
    data = as_written(event) if content else hidden(event)
    return b"id: %s\nevent: %s\ndata: %s\n\n" % (number.encode(), type_of(event).encode(), encode_line(data))


def broken_line(problem: Problem) -> bytes:
    """Why a stream ends before its end."""
    return b"event: gateway_error\ndata: " + refusal(problem).body + b"\n\n"


def _actions(status: bytes | None, asked: bytes | None, continues: bytes | None, choice: bytes | None) -> list[str]:
    """The actions that are possible now. A resume may still be refused because of the run's output."""
    now = status_of(status)
    if now in (*UNENDED, "awaited"):
        return ["cancel"]
    if now not in ("incomplete", "failed", "cancelled") or asked is None:
        return []
    nth = int(choice or 0)
    return ["retry"] if (continues or b"")[nth : nth + 1] == b"0" else ["retry", "resume"]


def _decision(fields: dict[bytes, bytes]) -> decisions.Decided | None:
    try:
        return decisions.decoder.decode(fields.get(DATA_FIELD.encode(), b""))
    except msgspec.DecodeError:
        return None


def _after(request: Request) -> int:
    given = request.headers.get("last-event-id") or request.query_params.get("after", "-1")
    digits = given.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) < 16) or int(given) < -1:
        raise invalid("after", "must be the seq of an event")
    return int(given)
