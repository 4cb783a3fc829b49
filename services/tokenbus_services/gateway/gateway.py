"""What the routes of every surface work with: runs, access control, model names, and the answer to a posted request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias, cast

import msgspec
import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.websockets import WebSocket

from tokenbus.blobs import DEFAULT_MEDIA_TYPE, BlobRef, BlobStreams
from tokenbus.errors import TokenbusError
from tokenbus.events.public import PublicEvent
from tokenbus_services.blobs.client import loader_of
from tokenbus_services.gateway.answers.answer import AnswerTimes, RunAnswer, RunOfAnswer, StreamedAnswer, WholeRunAnswer
from tokenbus_services.gateway.answers.media import InlineMedia
from tokenbus_services.gateway.audit import AuditedRun, FrameAudit, audited
from tokenbus_services.gateway.callers import AccessControl, Caller
from tokenbus_services.gateway.conversation_store import ConversationStore
from tokenbus_services.gateway.forward.forward import Forwarder
from tokenbus_services.gateway.forward.owners import Owner
from tokenbus_services.gateway.http_request import (
    AfterRouting,
    AsgiApp,
    Refuse,
    Scope,
    headers_in,
    owner_of,
    read_request,
    release_body,
    response_to,
)
from tokenbus_services.gateway.metrics import GatewayMetrics
from tokenbus_services.gateway.models import ModelTable
from tokenbus_services.gateway.parked import ParkedRuns, until_parked
from tokenbus_services.gateway.problem import Problem, Refusal, defect, of_exception, overloaded, restarting
from tokenbus_services.gateway.request_spans import RequestSpans
from tokenbus_services.gateway.runs import GatewayRun, GatewayRuns
from tokenbus_services.gateway.surfaces.contract import Encoder, GatewayRequest, Translated, left_out_header
from tokenbus_services.gateway.surfaces.surface import Surface
from tokenbus_services.net.web_socket import OWNER, FairShare
from tokenbus_services.settings import Settings

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

Handler: TypeAlias = Callable[[Request], Awaitable[Any]]
"""A Starlette endpoint: returns an ASGI app, a `Response` say."""
_PLACE = "tokenbus.place"


class Gateway:
    """One gateway's parts, for its routes."""

    def __init__(
        self,
        settings: Settings,
        *,
        runs: GatewayRuns,
        access: AccessControl,
        models: ModelTable,
        metrics: GatewayMetrics,
        spans: RequestSpans | None = None,
    ) -> None:
        assert settings.gateway
        self.settings = settings.gateway
        self.runs = runs
        self.access = access
        self.models = models
        self.metrics = metrics
        self._spans = spans
        self.forwarder = Forwarder(settings, access, spans, runs)
        self.keep_session_s = settings.retention.session_s
        """How long a session is kept after its last event."""
        self.conversations = ConversationStore(runs.server, settings)
        self.blobs = loader_of(settings.blobs)
        self.media = InlineMedia(self.blobs, FairShare(settings.gateway.media_bytes))
        self._places = FairShare(settings.gateway.connections)
        """Requests that are answered, streams and sockets above all."""
        self.bodies = FairShare(settings.gateway.inbound_bytes)
        """Bytes of bodies and frames that are not published yet."""
        self.times = AnswerTimes(
            early_status_s=settings.gateway.early_status_s,
            keep_alive_s=settings.gateway.keep_alive_s,
            send_timeout_s=settings.gateway.send_timeout_s,
        )

    def posted(self, surface: Surface) -> list[BaseRoute]:
        """Routes whose requests are translated by the surface and answered with their run, streamed or whole."""

        async def handle(request: Request) -> Any:
            caller = await self.caller(request, surface)
            asked = await self.read(request)
            return await self.run(caller, surface, asked)

        endpoint = self.guarded(surface.name, surface.refusal, handle)
        return [Route(path, endpoint, methods=["POST"]) for path in surface.paths]

    async def caller(
        self, request: Request, surface: Surface | None = None, *, name: str = "", upload: Owner | None = None
    ) -> Caller:
        """Return the caller of the request, which then has one of the gateway's places.

        ``upload``: which the request goes on with, in place of a key. Raises Refusal (401; 403 if the key is not for
        this surface; 429 and 503 if there is no place).
        """
        access = self.access
        caller = await (access.known(upload.key) if upload else access.identify(headers_in(request)))
        request.state.caller = caller
        if surface or name:
            caller.may_use(surface.name if surface else name)
        self.enter(request.scope, caller.key)
        return caller

    def enter(self, scope: Scope, owner: str | None) -> None:
        """Give a request or a socket of this key one of the places, until `leave`. Raises Refusal (429, 503).

        It has one place, of the owner that was known last.
        """
        scope["state"][OWNER] = owner
        if _PLACE in scope:
            if scope[_PLACE] == owner:
                return
            self._places.give_back(scope.pop(_PLACE))
        self._take_place(owner)
        scope[_PLACE] = owner

    def leave(self, scope: Scope) -> None:
        """Give back what the request or socket holds."""
        release_body(scope, self.bodies)
        if _PLACE in scope:
            self._places.give_back(scope.pop(_PLACE))

    @contextmanager
    def place(self, owner: str | None) -> Generator[None]:
        """One of the places, for a request over a socket. Raises Refusal (429, 503)."""
        self._take_place(owner)
        try:
            yield
        finally:
            self._places.give_back(owner)

    def _take_place(self, owner: str | None) -> None:
        if not self._places.take(owner):
            raise overloaded("too_many_requests", "under way are too many", of_key=bool(owner))

    async def read(self, request: Request) -> GatewayRequest:
        """Read the body of a caller's request. Raises as `read_request`."""
        return await read_request(request, most_bytes=self.settings.body_bytes, room=self.bodies)

    def hold_frame(self, websocket: WebSocket, size: int) -> HeldFrame:
        """Count a frame of a socket among the bodies. Raises Refusal (429, 503)."""
        return HeldFrame(self.bodies, owner_of(websocket.scope), size)

    async def run(self, caller: Caller, surface: Surface, asked: GatewayRequest) -> RunAnswer:
        """Publish a request and return its answer. A request that gives results of calls for which a run waits is
        answered with the rest of that run. Raises Refusal, TokenbusError.
        """
        translated = surface.translate(asked, caller.rules)
        if translated.given:
            parked = ParkedRuns(self.runs, surface.door)
            if translated.only_answers:
                return await self._go_on(caller, surface, asked, translated, parked)
            await parked.go_on_without(caller, translated.given)
        opened = await self.runs.publish(caller, surface, asked, translated)
        until = None
        if translated.echo.get("bus_tools"):
            until = partial(until_parked, self.runs, opened.id, surface.waits_for(opened.note))
        return self.answer(opened, surface, asked, translated, until)

    async def _go_on(
        self, caller: Caller, surface: Surface, asked: GatewayRequest, translated: Translated, parked: ParkedRuns
    ) -> RunAnswer:
        """Answer results of calls with the rest of their run, which goes on without its client."""
        decisions = await parked.of_calls(caller, translated.given)
        if refused := await parked.send(caller, decisions):
            raise refused
        run, note = decisions.run, self.runs.note(surface, translated)
        begun = (await self.runs.owned(run, caller)).note
        known = {name: begun.echo[name] for name in ("api", "apis", "on_failure") if begun and name in begun.echo}
        note = msgspec.structs.replace(note, echo={**note.echo, **known, "bus_tools": True})
        use = AuditedRun(run=run, model=note.model)
        rest = until_parked(
            self.runs,
            run,
            surface.waits_for(note),
            self.follow(surface, run, caller.key),
            after=decisions.after,
            decided=decisions.waits,
        )
        how = RunOfAnswer(
            run=run,
            events=use.watched(rest),
            refusal=surface.refusal,
            headers=left_out_header(note.left_out),
            times=self.times,
            use=use,
        )
        if not translated.stream:
            return WholeRunAnswer(how, whole=lambda _: surface.whole(note, run))
        return self._streamed(how, surface, lambda _: surface.encoder(asked, note, run))

    def _streamed(
        self, how: RunOfAnswer, surface: Surface, encoder: Callable[[PublicEvent], Encoder]
    ) -> StreamedAnswer:
        return StreamedAnswer(
            msgspec.structs.replace(how, headers={**how.headers, **surface.stream_headers}),
            encoder=encoder,
            media_type=surface.media_type,
            keep_alive=surface.keep_alive,
        )

    def answer(
        self,
        opened: GatewayRun,
        surface: Surface,
        asked: GatewayRequest | None = None,
        translated: Translated | None = None,
        until: Callable[[AsyncGenerator[PublicEvent]], AsyncGenerator[PublicEvent]] | None = None,
    ) -> RunAnswer:
        """The answer to a published request. Without ``translated``: to a run that continues without its client.
        ``until``: ends the answer before its run.
        """
        events = self.follow(surface, opened.id, opened.caller.key, new=not opened.joined)
        cancels = translated is not None and translated.on_disconnect == "cancel" and not translated.background
        use = AuditedRun(run=opened.id, model=opened.note.model, span=opened.span)
        how = RunOfAnswer(
            run=opened.id,
            events=use.watched(until(events) if until else events),
            refusal=surface.refusal,
            headers=opened.headers,
            on_client_gone=(lambda: self.runs.client_gone(opened)) if cancels else None,
            on_end=lambda: self.runs.leave(opened),
            times=self.times,
            use=use,
        )
        if translated is None or not translated.stream:
            return WholeRunAnswer(how, whole=lambda first: surface.whole(opened.note_for(first), opened.id))
        return self._streamed(how, surface, lambda first: surface.encoder(asked, opened.note_for(first), opened.id))

    def follow(
        self, surface: Surface, run: str, owner: str | None, *, after: int = -1, new: bool = False
    ) -> AsyncGenerator[PublicEvent]:
        """A run's events for an answer of this surface (see `Client.follow`). ``owner``: the client's key."""
        events = self.runs.follow(run, after=after, new=new)
        return self.media.filled(events, owner) if surface.inlines_media else events

    def frame_audit(self, surface: str, *, method: str) -> FrameAudit:
        """What counts one request of a WebSocket, and writes its line into the log."""
        return FrameAudit(surface, method=method, metrics=self.metrics, spans=self._spans)

    async def blob(self, blob_id: str) -> tuple[BlobRef, AsyncGenerator[bytes]]:
        """A blob of the deployment's store: what it is, and its content. Raises BlobError."""
        if not isinstance(self.blobs, BlobStreams):
            content = await self.blobs.load(blob_id)
            return BlobRef(blob_id=blob_id, media_type=DEFAULT_MEDIA_TYPE, size=len(content)), _once(content)
        return await self.blobs.head(blob_id), cast("AsyncGenerator[bytes]", self.blobs.chunks(blob_id))

    async def aclose(self) -> None:
        """Close the connection to the blob store."""
        await self.blobs.aclose()

    def guarded(self, name: str, refusal: Refuse, handle: Handler) -> GuardedEndpoint:
        """Wrap an endpoint: problems are answered in the surface's own shape, and every request is counted."""
        return GuardedEndpoint(self, name, refusal, handle)

    def counted(self, name: str, request: Request, answer: Any, *, of_key: bool = True) -> AsgiApp:
        """The answer to a request, which is counted and logged, and gives back what the request holds. ``of_key``:
        whether it counts for the client's key, too.
        """
        metrics, spans = (self.metrics, self._spans) if of_key else (None, None)
        counted = self.metrics.counted(name, audited(name, request, answer, metrics=metrics, spans=spans))

        async def app(scope: Scope, receive: Any, send: Any) -> None:
            try:
                await counted(scope, receive, send)
            finally:
                self.leave(scope)

        return app


class HeldFrame:
    """The bytes of a frame that is not published yet, until `release`."""

    def __init__(self, bodies: FairShare, owner: str | None, size: int) -> None:
        """Raises Refusal (429, 503)."""
        if not bodies.take(owner, size):
            raise overloaded("too_many_bytes", "hold too many bytes of frames", of_key=bool(owner))
        self._bodies = bodies
        self._owner = owner
        self._size = size

    def release(self) -> None:
        """Give them back; a second time changes nothing."""
        if self._size:
            self._bodies.give_back(self._owner, self._size)
            self._size = 0


class GuardedEndpoint:
    """The ASGI app of a route. Whatever happens is answered, problems in the form of ``refusal``."""

    def __init__(self, gateway: Gateway, name: str, refusal: Refuse, handle: Handler) -> None:
        self.refusal = refusal
        self._gateway = gateway
        self._name = name
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        request = Request(scope, receive, send)
        try:
            answer = await self._handle(request)
        except Refusal as e:
            answer = self._response(e.problem, scope)
        except TokenbusError as e:
            answer = self._response(of_exception(e), scope)
        except ClientDisconnect:
            answer = Response(status_code=499)
        except asyncio.CancelledError:  # the server stops, and waits for nothing but this answer
            answer = self._response(restarting(), scope)
        except Exception:
            log.exception("request_failed", surface=self._name)
            answer = self._response(defect(), scope)
        release_body(scope, self._gateway.bodies)
        AfterRouting.later(scope, self._gateway.counted(self._name, request, answer))

    def _response(self, problem: Problem, scope: Scope) -> Response:
        return response_to(problem, self.refusal, scope)


async def _once(content: bytes) -> AsyncGenerator[bytes]:
    yield content
