"""One line in the log for each request: who asked, for which run, how it ended and what it used. Never any content.

What a request changes is in the deployment's audit, too.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, MutableMapping
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

import structlog
from starlette.requests import Request

from tokenbus.bus.audit import audit
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server, translated
from tokenbus.events.public import Cancelled, Completed, Incomplete, PublicEvent, RunFailedEvent
from tokenbus.events.usage import Usage
from tokenbus_services.gateway.callers import Caller
from tokenbus_services.gateway.http_request import REQUEST_ID, AsgiApp
from tokenbus_services.gateway.metrics import GatewayMetrics
from tokenbus_services.gateway.request_spans import RequestSpan, RequestSpans

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

MAX_NAME = 200


class Changes:
    """Enters what callers change into the deployment's audit."""

    def __init__(self, server: Server, keys: Keys) -> None:
        self._server = server
        self._keys = keys

    async def note(self, caller: Caller, door: str, action: str, **facts: object) -> None:
        """An entry for something done. ``door``: the surface. Raises ServerError."""
        facts = {"tenant": caller.tenant or None, **facts}
        with translated(self._server):
            await audit(self._server, self._keys, action, by=caller.key or "gateway", door=door, **facts)


class AuditedRun:
    """What is known of a run, or of a call that is none, when its answer has ended."""

    def __init__(self, run: str | None, model: str, span: RequestSpan | None = None) -> None:
        self.run = run
        self.span = span
        self.model = model
        self.end = ""
        """Type of the terminal event; empty if the answer ended before the run."""
        self.usage: Usage | None = None

    async def watched(self, events: AsyncGenerator[PublicEvent]) -> AsyncGenerator[PublicEvent]:
        """The same events."""
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Completed | Incomplete | RunFailedEvent | Cancelled):
                    self.end = str(event.__struct_config__.tag)
                    self.run, self.usage = event.run, event.usage
                yield event


def audited(
    surface: str,
    request: Request,
    answer: Any,
    *,
    metrics: GatewayMetrics | None = None,
    spans: RequestSpans | None = None,
) -> AsgiApp:
    """The same ASGI app; when it has ended, the request is in the log, and counted for its key."""
    began = time.monotonic()

    async def app(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        status = 0

        async def sent(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await answer(scope, receive, sent)
        finally:
            use: AuditedRun | None = getattr(answer, "use", None) or getattr(request.state, "use", None)
            caller: Caller | None = getattr(request.state, "caller", None)
            name: str | None = getattr(request.state, REQUEST_ID, None)
            run: str | None = use.run if use else getattr(answer, "run", None)
            _write(surface, request.method, status, began=began, caller=caller, run=run, use=use, request=name)
            _count(surface, request.method, status, caller=caller, use=use, metrics=metrics, spans=spans)

    return app


class FrameAudit:
    """One request of a WebSocket: ``with``. When it has ended, it is in the log, and counted like one over HTTP."""

    def __init__(self, surface: str, *, method: str, metrics: GatewayMetrics, spans: RequestSpans | None) -> None:
        self.caller: Caller | None = None
        self.use: AuditedRun | None = None
        self.status = 200
        """As it would be over HTTP."""
        self._surface = surface
        self._method = method
        self._metrics = metrics
        self._spans = spans
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        self._metrics.frame_begun(self._surface)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        use, caller, status = self.use, self.caller, self.status
        self._metrics.frame_ended(self._surface, status)
        _write(
            self._surface, self._method, status, began=self._began, caller=caller, run=use.run if use else None, use=use
        )
        _count(self._surface, self._method, status, caller=caller, use=use, metrics=self._metrics, spans=self._spans)


def _write(
    surface: str,
    method: str,
    status: int,
    *,
    began: float,
    caller: Caller | None,
    run: str | None,
    use: AuditedRun | None,
    request: str | None = None,
) -> None:
    usage = (use and use.usage) or Usage()
    facts = {
        "surface": surface,
        "method": method,
        "request": request,
        "key": caller and caller.key,
        "tenant": (caller and caller.tenant) or None,
        "run": run,
        "model": use.model[:MAX_NAME] if use else None,
        "end": (use and use.end) or None,
        "input_tokens": usage.input,
        "output_tokens": usage.output,
    }
    known = {name: value for name, value in facts.items() if value is not None}
    log.info("gateway_request", status=status, ms=round((time.monotonic() - began) * 1000), **known)


def _count(
    surface: str,
    method: str,
    status: int,
    *,
    caller: Caller | None,
    use: AuditedRun | None,
    metrics: GatewayMetrics | None,
    spans: RequestSpans | None,
) -> None:
    if spans and use and use.span:
        spans.ended(use.span, surface=surface, method=method, status=status, run=use.run, end=use.end or None)
    if metrics and caller and caller.key:
        metrics.of_key(caller.key, status, (use and use.usage) or Usage())
