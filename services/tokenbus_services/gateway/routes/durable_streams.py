"""Routes of Durable Streams: run logs, which are read, and sessions, which are written, too.

A stream is read once, by long-poll and by SSE. A message that a writer appends to a session is a text for the model, or
an item as in `POST /sessions/{id}/events`; a message that a reader gets is an event of the session's one order.
"""

from __future__ import annotations

import asyncio
import re
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing
from hashlib import sha256
from typing import Any, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from tokenbus import SessionCursor
from tokenbus.bus.scripts.gateway import put_key
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import translated
from tokenbus.client.publishing import new_run_id
from tokenbus.core.request.parse import request_from
from tokenbus.errors import CursorTrimmed, SessionNotFound
from tokenbus.events.public import TERMINAL, PublicEvent
from tokenbus.events.requests import Append, Configure, Delete, SessionItem, SessionMessage
from tokenbus.events.sessions import session_ref
from tokenbus_services.gateway.answers import asgi
from tokenbus_services.gateway.callers import Caller
from tokenbus_services.gateway.gateway import Gateway
from tokenbus_services.gateway.problem import Problem, Refusal, invalid, unsupported
from tokenbus_services.gateway.session_answers import returned
from tokenbus_services.gateway.surfaces.durable_streams import protocol
from tokenbus_services.gateway.surfaces.durable_streams.protocol import MAX_PAGE, NOW, START, Ask, Page, Producer
from tokenbus_services.gateway.surfaces.surface import DEFAULT_MODEL

NAME = "durable_streams"
JSON = "application/json"
LONG_POLL_S = 20.0
SSE_S = 60.0
"""After this time the server ends an SSE answer, and the reader resumes from its offset."""
MAX_PRODUCERS = 1000
"""Of one session."""
_STREAM_SEQ = "stream-seq"
_CURSOR = re.compile(r"([0-9]{10})_([0-9]{10})_([0-9a-f]{8})")


def routes(gateway: Gateway) -> list[BaseRoute]:
    streams = _Streams(gateway)
    at_session = "/v1/stream/sessions/{session}"

    def guarded(handle: Any) -> Any:
        return gateway.guarded(NAME, protocol.refusal, handle)

    return [
        Route(at_session, guarded(streams.make), methods=["PUT"]),
        Route(at_session, guarded(streams.append), methods=["POST"]),
        Route(at_session, guarded(streams.delete), methods=["DELETE"]),
        Route(at_session, guarded(streams.read_session), methods=["GET", "HEAD"]),
        Route("/v1/stream/{run:path}", guarded(streams.read_run), methods=["GET", "HEAD"]),
    ]


class _Stream(ABC):
    """What is read."""

    name: str

    @abstractmethod
    async def page(self, offset: str) -> Page:
        """What it has from an offset on, without waiting. Raises Refusal."""

    @abstractmethod
    async def wait(self, page: Page) -> None:
        """Return once there is more than the page has."""

    async def after(self, page: Page, wait_s: float) -> Page:
        """The next page; an empty one if nothing came in time."""
        try:
            async with asyncio.timeout(wait_s):
                await self.wait(page)
        except TimeoutError:
            pass
        return await self.page(page.next)


class _RunLog(_Stream):
    def __init__(self, gateway: Gateway, run: str) -> None:
        self.name = run
        self._runs = gateway.runs

    async def page(self, offset: str) -> Page:
        position = protocol.position(offset)
        last = await self._runs.last_event(self.name)
        tail = last.seq + 1 if last else 0
        start = tail if position is None else position
        if start > tail:
            raise invalid("offset", "is beyond the end of this stream")
        events = await self._events(start, min(tail, start + MAX_PAGE)) if start < tail else []
        return protocol.log_page(start, events, tail=tail, closed=isinstance(last, TERMINAL))

    async def wait(self, page: Page) -> None:
        start = protocol.position(page.next) or 0
        await self._events(start, start + 1)

    async def _events(self, start: int, end: int) -> list[PublicEvent]:
        events: list[PublicEvent] = []
        try:
            async with aclosing(self._runs.follow(self.name, after=start - 1)) as log:
                async for event in log:
                    events.append(event)
                    if event.seq + 1 >= end:
                        break
        except CursorTrimmed as e:
            raise Refusal(Problem(status=410, code=e.code, message=str(e), kind="not_found", run=self.name)) from None
        return events


class _Session(_Stream):
    def __init__(self, gateway: Gateway, caller: Caller, name: str) -> None:
        self.name = name
        self._door = gateway.runs.sessions
        self._caller = caller

    async def page(self, offset: str) -> Page:
        door, caller, name = self._door, self._caller, self.name
        if offset == NOW:
            at = _offset_of(await door.now(caller, name))
            return Page(start=at, next=at, items=[], up_to_date=True)
        after = SessionCursor(made=(await door.now(caller, name)).made) if offset == START else _cursor_in(offset)
        items: list[bytes] = []
        cursor, up_to_date = after, True
        async with aclosing(await door.follow(caller, name, after=after, live=False)) as steps:
            async for step in steps:
                if len(items) == MAX_PAGE:
                    up_to_date = False
                    break
                items.append(protocol.session_item(step.event))
                cursor = step.cursor
        return Page(start=_offset_of(after), next=_offset_of(cursor), items=items, up_to_date=up_to_date)

    async def wait(self, page: Page) -> None:
        after = _cursor_in(page.next)
        async with aclosing(await self._door.follow(self._caller, self.name, after=after, live=True)) as steps:
            await anext(steps)


class _Streams:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._door = gateway.runs.sessions
        self._server, self._keys = gateway.runs.server, gateway.runs.keys

    # --- reading --------------------------------------------------------------------------------------------------

    async def read_run(self, request: Request) -> Any:
        """Answer a reader of a run's log."""
        caller = await self._gateway.caller(request, name=NAME)
        run = (await self._gateway.runs.owned(request.path_params["run"], caller)).id
        return await self._read(request, _RunLog(self._gateway, run))

    async def read_session(self, request: Request) -> Any:
        """Answer a reader of a session."""
        caller = await self._gateway.caller(request, name=NAME)
        return await self._read(request, _Session(self._gateway, caller, request.path_params["session"]))

    async def _read(self, request: Request, stream: _Stream) -> Any:
        if request.method == "HEAD":
            page = await stream.page(NOW)
            return _response(b"", 200, protocol.headers_of(page) | {"content-type": JSON})
        ask = protocol.asked(request.query_params.multi_items())
        page = await stream.page(ask.offset)
        match ask.live:
            case "sse":
                # The protocol wants this type and no other, so it has no charset.
                return asgi.EventStream(
                    self._stream(stream, page, ask),
                    broken=protocol.broken,
                    send_timeout_s=self._gateway.times.send_timeout_s,
                    headers={**protocol.SAFE_HEADERS, **asgi.STREAM_HEADERS},
                    media_type="text/event-stream",
                )
            case "long-poll":
                return await self._long_poll(stream, page, ask)
            case _:
                etag = protocol.etag_of(stream.name, page)
                headers = protocol.headers_of(page, etag=etag)
                if request.headers.get("if-none-match") == etag:
                    return _response(b"", 304, headers)
                return _response(protocol.body_of(page), 200, headers)

    async def _long_poll(self, stream: _Stream, page: Page, ask: Ask) -> Response:
        if not page.items and not page.ended:
            page = await stream.after(page, LONG_POLL_S)
        headers = protocol.headers_of(page, cursor=protocol.cursor_of(time.time(), ask.cursor))
        return _response(protocol.body_of(page) if page.items else b"", 200 if page.items else 204, headers)

    async def _stream(self, stream: _Stream, page: Page, ask: Ask) -> AsyncGenerator[bytes]:
        clock = asyncio.get_running_loop().time
        until = clock() + SSE_S
        cursor = protocol.cursor_of(time.time(), ask.cursor)
        yield protocol.sse_of(page, cursor)
        while not page.ended and (left := until - clock()) > 0:
            page = await stream.after(page, min(left, self._gateway.times.keep_alive_s))
            yield protocol.sse_of(page, cursor) if page.items else b": keep-alive\n\n"

    # --- writing --------------------------------------------------------------------------------------------------

    async def make(self, request: Request) -> Response:
        """Make a session of the model ``?model=``; the same again changes nothing."""
        caller, name, body = await self._written(request)
        for header in ("stream-ttl", "stream-expires-at", "stream-forked-from", "stream-closed"):
            if header in request.headers:
                raise unsupported(header, "a session has no such stream: see docs/guides/durable-streams.md")
        items = [_item(message) for message in protocol.messages_in(body)] if body not in (b"", b"[]") else []
        _check_type(request)
        status = 200
        try:
            await self._door.info(caller, name)
        except SessionNotFound:
            status = 201
            model = request.query_params.get("model", DEFAULT_MODEL)
            await self._door.append(caller, NAME, name, Configure(request={"model": model}))
            await self._put(caller, name, items, new_run_id())
        headers = await self._head(caller, name)
        return _response(b"", status, {**headers, "content-type": JSON, "location": str(request.url)})

    async def append(self, request: Request) -> Response:
        """Append messages, once if an idempotent producer does."""
        caller, name, body = await self._written(request)
        producer = protocol.producer_in(request.headers)
        if request.headers.get("stream-closed") == "true":
            raise unsupported("stream-closed", "a session is not closed by a writer: DELETE removes it")
        state, seq = await self._state(caller, name), request.headers.get(_STREAM_SEQ)
        if body:
            _check_type(request)
        items = [_item(message) for message in protocol.messages_in(body)]
        while producer:
            before, (epoch, last) = await self._accepted(state, producer)
            if protocol.judged(producer, epoch, last) == "known":
                return _response(b"", 204, await self._head(caller, name, epoch, last))
            await self._claim(state, seq)
            seq = None
            # The ids name the producer, so what was lost in the middle is repeated.
            await self._put(caller, name, items, _append_of(producer))
            if await self._store(state, _field(producer), before, msgspec.json.encode([producer.epoch, producer.seq])):
                return _response(b"", 200, await self._head(caller, name, producer.epoch, producer.seq))
        await self._claim(state, seq)
        await self._put(caller, name, items, new_run_id())
        return _response(b"", 204, await self._head(caller, name))

    async def delete(self, request: Request) -> Response:
        """Remove the session with its runs."""
        caller = await self._gateway.caller(request, name=NAME)
        name = request.path_params["session"]
        await self._door.info(caller, name)
        await self._door.append(caller, NAME, name, Delete())
        return Response(status_code=204, headers=protocol.SAFE_HEADERS)

    async def _put(self, caller: Caller, name: str, items: list[SessionItem], append: str) -> None:
        for n, item in enumerate(items):
            receipt, _ = await self._door.append(caller, NAME, name, item, append=f"{append}.{n}")
            if receipt.fate.state == "returned":
                raise returned(receipt.fate.reason or "", receipt.fate.problem)

    async def _head(
        self, caller: Caller, name: str, epoch: int | None = None, seq: int | None = None
    ) -> dict[str, str]:
        """Headers of the answer to a writer; ``epoch``, ``seq``: what was accepted last of the producer."""
        now = _offset_of(await self._door.now(caller, name))
        told = {} if epoch is None else {"producer-epoch": str(epoch), "producer-seq": str(seq)}
        return {**protocol.SAFE_HEADERS, "cache-control": "no-store", "stream-next-offset": now, **told}

    async def _written(self, request: Request) -> tuple[Caller, str, bytes]:
        caller = await self._gateway.caller(request, name=NAME)
        asked = await self._gateway.read(request)
        return caller, request.path_params["session"], asked.body

    # --- what writers have sent -----------------------------------------------------------------------------------

    async def _state(self, caller: Caller, name: str) -> tuple[str, str]:
        """The key of a session's writers, and what its fields begin with. Raises SessionNotFound."""
        begun = (await self._door.info(caller, name)).begun_ms  # another one of this name has others
        return self._keys.gateway_writers(session_ref(caller.tenant, name)), f"{begun} "

    async def _accepted(self, state: tuple[str, str], producer: Producer) -> tuple[bytes, tuple[int, int]]:
        """The producer's last accepted append: as it is stored, and its epoch and number."""
        key, of_session = state
        with translated(self._server):
            found: bytes | None = await self._server.client.hget(key, of_session + _field(producer))
            if found is None and await self._server.client.hlen(key) > MAX_PRODUCERS:
                why = f"a session has at most {MAX_PRODUCERS} producers"
                raise Refusal(Problem(status=429, code="too_many_producers", message=why, kind="rate_limit"))
        return found or b"", msgspec.json.decode(found, type=tuple[int, int]) if found else (0, -1)

    async def _claim(self, state: tuple[str, str], seq: str | None) -> None:
        """Take a `Stream-Seq`, which must be behind the last one. Raises Refusal."""
        if seq is None:
            return
        while True:
            with translated(self._server):
                before: bytes = await self._server.client.hget(state[0], state[1] + _STREAM_SEQ) or b""
            if seq.encode("latin-1") <= before:
                why = "Stream-Seq must be behind that of the last append"
                raise Refusal(Problem(status=409, code="sequence_conflict", message=why, kind="invalid_request"))
            if await self._store(state, _STREAM_SEQ, before, seq.encode("latin-1")):
                return

    async def _store(self, state: tuple[str, str], field: str, before: bytes, entry: bytes) -> bool:
        key, of_session = state
        call = put_key(key, key_id=of_session + field, before=before, entry=entry)
        with translated(self._server):
            stored = await run_script(self._server, call) == 1
            await self._server.client.pexpire(key, round(self._gateway.keep_session_s * 1000))
        return stored


def _item(message: object) -> SessionItem:
    """What a writer's message puts into the session. Raises Refusal, RequestInvalid."""
    if isinstance(message, str):
        return SessionMessage(content=message)
    if not isinstance(message, dict):
        raise invalid(None, "a message is a text for the model, or an item with a type")
    given = request_from({"type": "append", "session": "s", "item": cast("dict[str, Any]", message)})
    assert isinstance(given, Append)
    if isinstance(given.item, Delete):
        raise invalid("type", "a session is deleted by DELETE")
    return given.item


def _field(producer: Producer) -> str:
    return f"p {producer.id}"


def _append_of(producer: Producer) -> str:
    digest = sha256(producer.id.encode("latin-1", "replace")).hexdigest()[:24]
    return f"ds.{digest}.{producer.epoch}.{producer.seq}"


def _check_type(request: Request) -> None:
    """Raise Refusal unless a writer's body is of the stream's type."""
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != JSON:
        why = f"a session is a stream of {JSON}"
        raise Refusal(Problem(status=409, code="content_type_mismatch", message=why, kind="invalid_request"))


def _offset_of(cursor: SessionCursor) -> str:
    return f"{cursor.session_seq + 1:010d}_{cursor.run_seq + 1:010d}_{cursor.made}"


def _cursor_in(offset: str) -> SessionCursor:
    found = _CURSOR.fullmatch(offset)
    if found is None:
        raise protocol.wrong_offset()
    return SessionCursor(int(found[1]) - 1, int(found[2]) - 1, found[3])


def _response(body: bytes, status: int, headers: dict[str, str]) -> Response:
    return Response(body, status, headers, media_type=JSON if body else None)
