"""What the routes of every surface work with: runs, access control, model names, and the answer to a posted request."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeAlias, cast

import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from tokenbus.blobs import DEFAULT_MEDIA_TYPE, BlobRef, BlobStreams
from tokenbus.errors import TokenbusError
from tokenbus_services.blobs.loader import loader_of
from tokenbus_services.gateway.answers import asgi
from tokenbus_services.gateway.answers.answer import AnswerTimes, RunAnswer, StreamedAnswer, WholeRunAnswer
from tokenbus_services.gateway.audit import AuditedRun, FrameAudit, audited
from tokenbus_services.gateway.callers import AccessControl, Caller
from tokenbus_services.gateway.http_request import AfterRouting, headers_in, read_request
from tokenbus_services.gateway.metrics import GatewayMetrics
from tokenbus_services.gateway.models import ModelTable
from tokenbus_services.gateway.problem import Problem, Refusal, of_exception
from tokenbus_services.gateway.request_spans import RequestSpans
from tokenbus_services.gateway.runs import GatewayRun, GatewayRuns
from tokenbus_services.gateway.surfaces.contract import Answer, GatewayRequest, Surface, Translated
from tokenbus_services.settings import Settings

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

Handler: TypeAlias = Callable[[Request], Awaitable[Any]]
"""A Starlette endpoint: returns an ASGI app, a `Response` say."""
Refuse: TypeAlias = Callable[[Problem], Answer]


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
        self._blobs = loader_of(settings.blobs)
        self.times = AnswerTimes(
            early_status_s=settings.gateway.early_status_s,
            keep_alive_s=settings.gateway.keep_alive_s,
            send_timeout_s=settings.gateway.send_timeout_s,
        )

    def post(self, path: str, surface: Surface) -> Route:
        """A route whose requests are translated by the surface and answered with their run, streamed or whole."""

        async def handle(request: Request) -> Any:
            caller = await self.caller(request, surface)
            asked = await read_request(request, most_bytes=self.settings.body_bytes)
            return await self.run(caller, surface, asked)

        return Route(path, self.guarded(surface.name, surface.refusal, handle), methods=["POST"])

    async def caller(self, request: Request, surface: Surface | None = None, *, name: str = "") -> Caller:
        """Return the caller of the request. Raises Refusal (401; 403 if the key is not for this surface)."""
        caller = await self.access.identify(headers_in(request))
        request.state.caller = caller
        caller.may_use(surface.name if surface else name)
        return caller

    async def run(self, caller: Caller, surface: Surface, asked: GatewayRequest) -> RunAnswer:
        """Publish a request and return its answer. Raises Refusal, TokenbusError."""
        return await self.publish(caller, surface, asked, self.translated(caller, surface, asked))

    def translated(self, caller: Caller, surface: Surface, asked: GatewayRequest) -> Translated:
        """Translate a request. Raises Refusal."""
        try:
            return surface.translate(asked, caller.rules)
        except RecursionError:
            raise Refusal(_too_deep()) from None

    async def publish(
        self, caller: Caller, surface: Surface, asked: GatewayRequest, translated: Translated
    ) -> RunAnswer:
        """Like `run`, for a translated request."""
        opened = await self.runs.publish(caller, surface, asked, translated)
        return self.answer(opened, surface, asked, translated)

    def answer(
        self,
        opened: GatewayRun,
        surface: Surface,
        asked: GatewayRequest | None = None,
        translated: Translated | None = None,
    ) -> RunAnswer:
        """The answer to a published request. Without ``translated``: to a run that continues without its client."""
        cancels = translated is not None and translated.on_disconnect == "cancel" and not translated.background
        how: dict[str, Any] = {
            "refusal": surface.refusal,
            "headers": opened.admission.headers,
            "on_client_gone": (lambda: self.runs.client_gone(opened)) if cancels else _stay,
            "on_end": lambda: self.runs.leave(opened),
            "times": self.times,
        }
        use = AuditedRun(run=opened.id, model=opened.note.model, span=opened.span)
        events = use.watched(self.runs.follow(opened.id, new=not opened.joined))
        how["use"] = use
        if translated is None or not translated.stream:
            return WholeRunAnswer(
                opened.id, events, whole=lambda first: surface.whole(opened.note_for(first), opened.id), **how
            )
        how["headers"] = {**how["headers"], **surface.stream_headers}
        return StreamedAnswer(
            opened.id,
            events,
            encoder=lambda first: surface.encoder(asked, opened.note_for(first), opened.id),
            media_type=surface.media_type,
            keep_alive=surface.keep_alive,
            **how,
        )

    def frame_audit(self, surface: str, *, method: str) -> FrameAudit:
        """What counts one request of a WebSocket, and writes its line into the log."""
        return FrameAudit(surface, method=method, metrics=self.metrics, spans=self._spans)

    async def blob(self, blob_id: str) -> tuple[BlobRef, AsyncGenerator[bytes]]:
        """A blob of the deployment's store: what it is, and its content. Raises BlobError."""
        if not isinstance(self._blobs, BlobStreams):
            content = await self._blobs.load(blob_id)
            return BlobRef(blob_id=blob_id, media_type=DEFAULT_MEDIA_TYPE, size=len(content)), _once(content)
        return await self._blobs.head(blob_id), cast("AsyncGenerator[bytes]", self._blobs.chunks(blob_id))

    async def aclose(self) -> None:
        """Close the connection to the blob store."""
        await self._blobs.aclose()

    def guarded(self, name: str, refusal: Refuse, handle: Handler) -> Handler:
        """Wrap an endpoint: problems are answered in the surface's own shape, and every request is counted."""

        async def endpoint(request: Request) -> Any:
            try:
                answer = await handle(request)
            except Refusal as e:
                answer = response_to(e.problem, refusal)
            except TokenbusError as e:
                answer = response_to(of_exception(e), refusal)
            except ClientDisconnect:
                answer = Response(status_code=499)
            return AfterRouting.later(
                self.metrics.counted(name, audited(name, request, answer, metrics=self.metrics, spans=self._spans))
            )

        return endpoint


def response_to(problem: Problem, refusal: Refuse) -> Response:
    """A problem as an HTTP answer, in the shape of ``refusal``."""
    answer = refusal(problem)
    headers = {**asgi.headers_of(problem), "x-content-type-options": "nosniff", **answer.headers}
    if problem.run:
        headers["x-tokenbus-run"] = problem.run
    return Response(answer.body, answer.status, headers, media_type=answer.media_type)


async def _once(content: bytes) -> AsyncGenerator[bytes]:
    yield content


def _stay() -> None:
    """The run continues without its client."""


def _too_deep() -> Problem:
    return Problem(
        status=400, code="invalid_value", message="the body's JSON is nested too deeply", kind="invalid_request"
    )
