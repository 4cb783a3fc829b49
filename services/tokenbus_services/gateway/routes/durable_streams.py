"""Routes of Durable Streams over run logs: reading once, by long-poll and by SSE. Nothing can be written."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from tokenbus.errors import CursorTrimmed
from tokenbus.events.public import TERMINAL, PublicEvent
from tokenbus_services.gateway.answers import asgi
from tokenbus_services.gateway.gateway import Gateway
from tokenbus_services.gateway.problem import Problem, Refusal, invalid
from tokenbus_services.gateway.surfaces.durable_streams import protocol
from tokenbus_services.gateway.surfaces.durable_streams.protocol import MAX_PAGE, Ask, LogPage

NAME = "durable_streams"
LONG_POLL_S = 20.0
SSE_S = 60.0
"""After this time the server ends an SSE answer, and the reader resumes from its offset."""


def routes(gateway: Gateway) -> list[BaseRoute]:
    logs = _Logs(gateway)
    endpoint = gateway.guarded(NAME, protocol.refusal, logs.read)
    return [Route("/v1/stream/{run:path}", endpoint, methods=["GET", "HEAD"])]


class _Logs:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def read(self, request: Request) -> Any:
        """Answer a reader."""
        caller = await self._gateway.caller(request, name=NAME)
        run = (await self._gateway.runs.owned(request.path_params["run"], caller)).id
        if request.method == "HEAD":
            page = await self._page(run, None)
            return _response(b"", 200, protocol.headers_of(page) | {"content-type": "application/json"})
        ask = protocol.asked(request.query_params.multi_items())
        page = await self._page(run, ask.offset)
        match ask.live:
            case "sse":
                # The protocol wants this type and no other, so it has no charset.
                return asgi.EventStream(
                    self._stream(run, page, ask),
                    broken=protocol.broken,
                    send_timeout_s=self._gateway.times.send_timeout_s,
                    headers={**protocol.SAFE_HEADERS, **asgi.STREAM_HEADERS},
                    media_type="text/event-stream",
                )
            case "long-poll":
                return await self._long_poll(run, page, ask)
            case _:
                etag = protocol.etag_of(run, page)
                headers = protocol.headers_of(page, etag=etag)
                if request.headers.get("if-none-match") == etag:
                    return _response(b"", 304, headers)
                return _response(protocol.body_of(page.events), 200, headers)

    async def _long_poll(self, run: str, page: LogPage, ask: Ask) -> Response:
        if not page.events and not page.closed:
            page = await self._after(run, page, LONG_POLL_S)
        headers = protocol.headers_of(page, cursor=protocol.cursor_of(time.time(), ask.cursor))
        return _response(protocol.body_of(page.events) if page.events else b"", 200 if page.events else 204, headers)

    async def _stream(self, run: str, page: LogPage, ask: Ask) -> AsyncGenerator[bytes]:
        clock = asyncio.get_running_loop().time
        until = clock() + SSE_S
        cursor = protocol.cursor_of(time.time(), ask.cursor)
        yield protocol.sse_of(page, cursor)
        while not page.ended and (left := until - clock()) > 0:
            page = await self._after(run, page, min(left, self._gateway.times.keep_alive_s))
            yield protocol.sse_of(page, cursor) if page.events else b": keep-alive\n\n"

    async def _page(self, run: str, offset: int | None) -> LogPage:
        """What the log has from an offset on, without waiting. Raises Refusal."""
        last = await self._gateway.runs.last_event(run)
        tail = last.seq + 1 if last else 0
        start = tail if offset is None else offset
        if start > tail:
            raise invalid("offset", "is beyond the end of this stream")
        events = await self._events(run, start, min(tail, start + MAX_PAGE)) if start < tail else []
        return LogPage(start=start, events=events, tail=tail, closed=isinstance(last, TERMINAL))

    async def _events(self, run: str, start: int, end: int) -> list[PublicEvent]:
        events: list[PublicEvent] = []
        try:
            async with aclosing(self._gateway.runs.follow(run, after=start - 1)) as log:
                async for event in log:
                    events.append(event)
                    if event.seq + 1 >= end:
                        break
        except CursorTrimmed as e:
            raise Refusal(Problem(status=410, code=e.code, message=str(e), kind="not_found", run=run)) from None
        return events

    async def _after(self, run: str, page: LogPage, wait_s: float) -> LogPage:
        """The next page; an empty one if nothing came in time."""
        try:
            async with asyncio.timeout(wait_s):
                await self._events(run, page.next, page.next + 1)
        except TimeoutError:
            pass
        return await self._page(run, page.next)


def _response(body: bytes, status: int, headers: dict[str, str]) -> Response:
    return Response(body, status, headers, media_type="application/json" if body else None)
