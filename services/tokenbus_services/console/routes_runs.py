"""Routes of one run: what it is, its events as they come, its decisions and blobs, and what may be done with it."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from tokenbus.bus.keys import DATA_FIELD
from tokenbus.bus.run_record import ACCEPTED, REQUEST, STATUS, UNENDED, RunStatus, status_of
from tokenbus.bus.server.server import translated
from tokenbus.events import decisions
from tokenbus.events.public import TERMINAL, PublicEvent, Started, UnknownEvent
from tokenbus_services.console.costs import Costs
from tokenbus_services.console.hiding import hidden
from tokenbus_services.console.http import Desk, body_of, json, refusal
from tokenbus_services.console.run_view import attempts_of, row_of
from tokenbus_services.console.session import PATH
from tokenbus_services.console.viewer import Viewer
from tokenbus_services.gateway.answers import StreamedAnswer
from tokenbus_services.gateway.problem import Problem, invalid
from tokenbus_services.gateway.runs import not_found
from tokenbus_services.gateway.surfaces.contract import Encoder
from tokenbus_services.gateway.surfaces.json_text import encode_line

SAFE_IMAGES = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp", "image/avif"})
"""What a browser may show as it is; everything else is saved as a file."""
MAX_DECISIONS = 500
_PAGE = 500
_MAX_LOOKED_AT = 20_000


def routes(desk: Desk, costs: Costs) -> list[BaseRoute]:
    """The routes."""
    parts = _RunRoutes(desk, costs)
    run = f"{PATH}/api/runs/{{run}}"
    return [
        Route(run, desk.view("see_runs", parts.run, links=True), methods=["GET"]),
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

    async def run(self, request: Request, viewer: Viewer) -> Response:
        run = await self._desk.run(request, viewer)
        server, key = self._runs.server, self._runs.keys.run(run)
        with translated(server, key):
            status, asked, accepted = await server.client.hmget(key, [STATUS, REQUEST, ACCEPTED])
        events = await self._runs.stored(run)
        content = viewer.may("see_content")
        found, accepted_ms = status_of(status), None if accepted is None else int(accepted)
        return json(
            {
                "row": row_of(run, events, found, accepted_ms, content=content, cost=self._cost(events)),
                "request": msgspec.Raw(asked) if asked and content else None,
                "attempts": attempts_of(events, content=content),
                "last_seq": events[-1].seq if events else -1,
                "actions": _actions(found, refused=asked is None) if viewer.may("act") else [],
            }
        )

    def _cost(self, events: list[PublicEvent]) -> float | None:
        """By the provider and model that answered last: exact for a run without fallbacks."""
        end, first = (events[-1], events[0]) if events else (None, None)
        if not isinstance(end, TERMINAL) or not isinstance(first, Started):
            return None
        return self._costs.cost(end.usage, end.provider or first.provider, [end.model, first.model])

    async def events(self, request: Request, viewer: Viewer) -> Any:
        run = await self._desk.run(request, viewer)
        after = _after(request)
        last = await self._runs.last_event(run)
        if isinstance(last, TERMINAL) and last.seq <= after:
            return Response(status_code=204)
        content = viewer.may("see_content")
        if content and after < 0:
            self._desk.audit("read", viewer, run=run)
        return StreamedAnswer(
            run,
            self._runs.follow(run, after=after),
            encoder=lambda first: EventEncoder(content=content),
            media_type="text/event-stream; charset=utf-8",
            keep_alive=b": \n\n",
            early=False,
            refusal=refusal,
            headers={},
            on_gone=_nothing,
            on_end=_nothing,
            times=self._desk.gateway.times,
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
        run = await self._desk.run(request, viewer)
        blob_id = request.path_params["blob_id"]
        if not await self._runs.names_blob(run, blob_id):
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
        await self._runs.bus.cancel(run, "cancelled at the console")
        self._desk.audit("cancel", viewer, run=run)
        return json({"run": run}, 202)

    async def retry(self, request: Request, viewer: Viewer) -> Response:
        return await self._again("retry", request, viewer)

    async def resume(self, request: Request, viewer: Viewer) -> Response:
        return await self._again("resume", request, viewer)

    async def _again(self, how: str, request: Request, viewer: Viewer) -> Response:
        run = await self._desk.run(request, viewer)
        again = (await body_of(request)).get("again", 1)
        if not isinstance(again, int) or isinstance(again, bool) or not 1 <= again <= 1000:
            raise invalid("again", "must be a number from 1 to 1000")
        publish = self._runs.bus.retry if how == "retry" else self._runs.bus.resume
        made = await publish(run, again=again)
        self._desk.audit(how, viewer, run=run, new_run=made.id)
        return json({"run": made.id}, 202)


class EventEncoder(Encoder):
    """A run's events, each with its seq as the id. Without ``content``, every text is replaced by its length."""

    def __init__(self, *, content: bool) -> None:
        self._content = content
        self._over = False

    def feed(self, event: PublicEvent) -> list[bytes]:
        if isinstance(event, TERMINAL):
            self._over = True
        unknown = isinstance(event, UnknownEvent)
        name = event.event_type if unknown else str(event.__struct_config__.tag)
        data = hidden(event) if not self._content else event.fields if unknown else event
        return [b"id: %d\nevent: %s\ndata: %s\n\n" % (event.seq, name.encode(), encode_line(data))]

    def broken(self, problem: Problem) -> list[bytes]:
        if self._over:
            return []
        self._over = True
        return [b"event: gateway_error\ndata: " + refusal(problem).body + b"\n\n"]


def _actions(status: RunStatus | None, *, refused: bool) -> list[str]:
    if status in (*UNENDED, "awaited"):
        return ["cancel"]
    if status in ("incomplete", "failed", "cancelled") and not refused:
        return ["retry", "resume"]
    return []


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


def _nothing() -> None:
    """Reading a run changes nothing of it."""
