"""Routes of the bus's own protocol: runs, their events, and the topics for operators.

``POST /runs``                publish: 202 with the run's id, or its events with ``Accept: text/event-stream``
``GET /runs``                 runs, the newest first: ``?state= &tenant= &older_than= &limit= &after=``; see `run_list`
``GET /runs/{id}``            the run's output so far as one object; with ``?wait=true`` after its end
``GET /runs/{id}/events``     its events; ``Last-Event-ID`` or ``?after=SEQ`` go on after one; 204 if there are no more;
                              ``?names=false``: without names, for `onmessage`; ``?tree=true``: with those of all
                              child runs below it
``POST /runs/{id}/cancel``    ``{"reason", "heard_through", "heard_characters"}``: 202
``POST /runs/{id}/retry``     the same request again, ``resume``: from its text on: 202 with the new run's id
``GET /runs/{id}/blobs/{id}`` a blob that the run's events name
``GET /topics/{topic}``       live events of all runs or sessions, for operators: ``?group=NAME`` shares them
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.responses import StreamingResponse
from starlette.routing import BaseRoute

from tokenbus import Response, TreeCursor
from tokenbus.bus.keys import TOPICS
from tokenbus.bus.liveness import stop_task
from tokenbus.client.decode import is_end
from tokenbus.client.rerun import MAX_AGAIN, How
from tokenbus.errors import ServerError
from tokenbus.events.public import TERMINAL, PublicEvent
from tokenbus_services.gateway.answers import asgi
from tokenbus_services.gateway.answers.answer import AnswerTimes
from tokenbus_services.gateway.callers import Caller
from tokenbus_services.gateway.gateway import Gateway, Handler
from tokenbus_services.gateway.http_request import headers_in
from tokenbus_services.gateway.problem import Problem, Refusal, invalid
from tokenbus_services.gateway.routes.routing import answered, awaited, rejoined, surface_routes
from tokenbus_services.gateway.routes.run_list import RunQuery, flag_in, page_of
from tokenbus_services.gateway.runs import not_found
from tokenbus_services.gateway.surfaces.contract import Answer, WholeAnswer
from tokenbus_services.gateway.surfaces.fields import Fields, is_whole, json_body
from tokenbus_services.gateway.surfaces.native import (
    NativeEncoder,
    NativeSurface,
    accepted,
    broken,
    lines_of,
)

T = TypeVar("T")
CHECK_S = 5.0
"""How often the key of a topic's reader is checked again."""


def routes(gateway: Gateway) -> list[BaseRoute]:
    native = _NativeRoutes(gateway)
    served: list[tuple[str, Handler, str]] = [
        ("/runs", native.runs, "GET"),
        ("/runs/{run}", native.whole, "GET"),
        ("/runs/{run}/events", native.events, "GET"),
        ("/runs/{run}/cancel", native.cancel, "POST"),
        ("/runs/{run}/retry", native.retry, "POST"),
        ("/runs/{run}/resume", native.resume, "POST"),
        ("/runs/{run}/blobs/{blob_id}", native.blob, "GET"),
        ("/topics/{topic}", native.topic, "GET"),
    ]
    return [*gateway.posted(native.surface), *surface_routes(gateway, native.surface, served)]


class _NativeRoutes:
    def __init__(self, gateway: Gateway) -> None:
        self.surface = NativeSurface()
        self._gateway = gateway

    async def runs(self, request: Request) -> Any:
        """The runs that the caller may see."""
        caller = await self._gateway.caller(request, self.surface)
        query = RunQuery.of(request.query_params.multi_items())
        page = await page_of(self._gateway.runs.deployment, query, caller)
        return answered(Answer(status=200, body=msgspec.json.encode(page)))

    async def whole(self, request: Request) -> Any:
        """The output so far, or once the run has ended."""
        run, _ = await self._owned(request)
        if request.query_params.get("wait") == "true":
            return awaited(self._gateway, self.surface, run, lambda first: _Whole())
        events = await self._gateway.runs.stored(run)
        if not events:  # published, and not accepted yet
            return answered(Answer(status=200, body=msgspec.json.encode({"run": run, "status": "open"})))
        return answered(_output(events))

    async def events(self, request: Request) -> Any:
        """The events after a seq."""
        run, _ = await self._owned(request)
        if flag_in("tree", request.query_params.get("tree", "false")):
            return await self._tree(request, run)
        after = _after(request)
        last = await self._gateway.runs.last_event(run)
        if isinstance(last, TERMINAL) and last.seq <= after:
            return HttpResponse(status_code=204)
        named = _named(request)
        return rejoined(self._gateway, self.surface, run, lambda first: NativeEncoder(named=named), after=after)

    async def _tree(self, request: Request, run: str) -> Any:
        """The events of the run and of all child runs below it after a cursor."""
        given = headers_in(request).get("last-event-id") or request.query_params.get("after")
        try:
            after = None if given is None else TreeCursor.parse(given)
        except ValueError:
            raise invalid("after", "must be the id of an event of a tree") from None
        named = _named(request)
        if after is not None and await self._gateway.runs.is_end_of_tree(run, after):
            return HttpResponse(status_code=204)
        return live_stream(
            self._gateway.times,
            self._gateway.runs.follow_tree(run, after=after),
            lambda step: lines_of(step.event, number=str(step.cursor), named=named, path=step.path),
            check=lambda: self._owned(request),
            broken=broken,
        )

    async def cancel(self, request: Request) -> Any:
        """Ask for the run's end."""
        run, fields = await self._owned(request)
        assert fields
        reason, heard = fields.text("reason"), fields.whole("heard_through", least=-1)
        characters = fields.whole("heard_characters", least=0)
        fields.end()
        await self._gateway.runs.cancel(run, reason, heard_through=heard, heard_characters=characters)
        await self._gateway.runs.changes.note(request.state.caller, self.surface.name, "cancel", run=run)
        return answered(accepted(run))

    async def retry(self, request: Request) -> Any:
        """The same request as a new run."""
        return await self._again(request, "retry")

    async def resume(self, request: Request) -> Any:
        """A new run that continues the text of this one."""
        return await self._again(request, "resume")

    async def _again(self, request: Request, how: How) -> Any:
        run, fields = await self._owned(request)
        assert fields
        again = fields.whole("again", least=1, most=MAX_AGAIN)
        fields.end()
        gateway, surface = self._gateway, self.surface
        opened = await gateway.runs.again(request.state.caller, surface.name, run, how, again=again or 1)
        return gateway.answer(opened, surface)

    async def blob(self, request: Request) -> Any:
        """A blob, if the run's events name it."""
        run, _ = await self._owned(request)
        blob_id = request.path_params["blob_id"]
        if not await self._gateway.runs.names_blob(run, blob_id):
            raise not_found(run)
        ref, chunks = await self._gateway.blob(blob_id)
        headers = {
            "content-length": str(ref.size),
            "etag": f'"{ref.blob_id}"',
            "cache-control": "private, max-age=31536000, immutable",
            # Content of models or strangers: browsers must neither guess its type nor run it.
            "x-content-type-options": "nosniff",
            "content-security-policy": "sandbox",
        }
        return StreamingResponse(chunks, headers=headers, media_type=ref.media_type)

    async def topic(self, request: Request) -> Any:
        """Live events of all runs, or of all sessions."""
        await self._operator(request)
        topic = request.path_params["topic"]
        if topic not in TOPICS:
            raise Refusal(Problem(status=404, code="not_found", message="no such topic", kind="not_found"))
        begin = request.query_params.get("from", "now")
        if begin not in ("now", "start"):
            raise invalid("from", "must be 'now' or 'start'")
        events = self._gateway.runs.of_topic(topic, request.query_params.get("group"), begin)
        return live_stream(
            self._gateway.times,
            events,
            # Without ids: a topic ends with its key alone, and a new reader begins where it says.
            lambda event: lines_of(event, number=None),
            check=lambda: self._operator(request),
            broken=broken,
        )

    async def _operator(self, request: Request) -> None:
        """Raises Refusal unless the caller is an operator now."""
        caller = await self._gateway.caller(request, self.surface)
        if not caller.operator:
            why = "topics are for operators: `operator = true` of a key makes it one's"
            raise Refusal(Problem(status=403, code="operators_only", message=why, kind="auth"))

    async def _owned(self, request: Request) -> tuple[str, Fields | None]:
        """The run of the path, and the body of a POST. Raises Refusal."""
        caller: Caller = await self._gateway.caller(request, self.surface)
        run: str = request.path_params["run"]
        fields: Fields | None = None
        if request.method == "POST":
            asked = await self._gateway.read(request)
            fields = Fields(json_body(asked.body) if asked.body else {})
        return (await self._gateway.runs.owned(run, caller)).id, fields


def live_stream(
    times: AnswerTimes,
    events: AsyncGenerator[T],
    lines: Callable[[T], bytes],
    *,
    check: Callable[[], Awaitable[object]],
    broken: Callable[[Problem], bytes],
) -> asgi.EventStream:
    """The answer to a reader who stays. ``check``: raises Refusal once it may not read any more."""
    written = _live_lines(events, lines, keep_alive_s=times.keep_alive_s, check=check)
    return asgi.EventStream(written, broken=broken, send_timeout_s=times.send_timeout_s)


async def _live_lines(
    events: AsyncGenerator[T],
    lines: Callable[[T], bytes],
    *,
    keep_alive_s: float,
    check: Callable[[], Awaitable[object]],
) -> AsyncGenerator[bytes]:
    waiting: asyncio.Task[T] | None = None
    clock = asyncio.get_running_loop().time
    check_at = clock() + CHECK_S
    try:
        while True:
            if clock() >= check_at:
                with suppress(ServerError):  # the keys cannot be read now
                    await check()
                check_at = clock() + CHECK_S
            waiting = waiting or asyncio.ensure_future(anext(events))
            done, _ = await asyncio.wait({waiting}, timeout=keep_alive_s)
            if not done:
                yield NativeSurface.keep_alive
                continue
            try:
                event = waiting.result()
            except StopAsyncIteration:
                return
            waiting = None
            yield lines(event)
    finally:
        await stop_task(waiting)
        await events.aclose()


class _Whole(WholeAnswer):
    """A run's output as one object."""

    def __init__(self) -> None:
        self._events: list[PublicEvent] = []

    def feed(self, event: PublicEvent) -> Answer | None:
        self._events.append(event)
        return _output(self._events) if is_end(event) else None


def _output(events: Sequence[PublicEvent]) -> Answer:
    response = Response.of(events)
    body = {**msgspec.to_builtins(response), "messages": msgspec.to_builtins(response.messages)}
    return Answer(status=200, body=msgspec.json.encode(body))


def _after(request: Request) -> int:
    """The seq after which the client resumes. `Last-Event-ID` of a reconnecting EventSource takes precedence."""
    given = headers_in(request).get("last-event-id") or request.query_params.get("after", "-1")
    if not is_whole(given.removeprefix("-")) or int(given) < -1:
        raise invalid("after", "must be the seq of an event")
    return int(given)


def _named(request: Request) -> bool:
    """Whether events have names: `onmessage` of an EventSource gets only those without. Raises Refusal."""
    given = request.query_params.get("names", "true")
    if given not in ("true", "false"):
        raise invalid("names", "must be true or false")
    return given == "true"
