"""One line in the log for each request: who asked, for which run, how it ended and what it used. Never any content."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, MutableMapping
from contextlib import aclosing
from typing import Any

import structlog
from starlette.requests import Request

from tokenbus.events.public import Cancelled, Completed, Incomplete, PublicEvent, RunFailedEvent
from tokenbus.events.usage import Usage
from tokenbus_services.gateway.http_request import REQUEST_ID, AsgiApp
from tokenbus_services.gateway.metrics import GatewayMetrics
from tokenbus_services.gateway.request_spans import RequestSpan, RequestSpans

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

MAX_NAME = 200


class RunUse:
    """What is known of a run when its answer has ended."""

    def __init__(self, run: str, model: str, span: RequestSpan | None = None) -> None:
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
                    self.usage = event.usage
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
            log.info("gateway_request", status=status, ms=round((time.monotonic() - began) * 1000), **_facts(answer))
            use: RunUse | None = getattr(answer, "use", None)
            if spans and use and use.span:
                spans.ended(
                    use.span, surface=surface, method=request.method, status=status, run=use.run, end=use.end or None
                )
            caller = getattr(request.state, "caller", None)
            if metrics and caller and caller.key:
                metrics.of_key(caller.key, status, (use and use.usage) or Usage())

    def _facts(answer: Any) -> dict[str, Any]:
        caller = getattr(request.state, "caller", None)
        use: RunUse | None = getattr(answer, "use", None)
        usage = (use and use.usage) or Usage()
        facts = {
            "surface": surface,
            "method": request.method,
            "request": getattr(request.state, REQUEST_ID, None),
            "key": caller and caller.key,
            "tenant": (caller and caller.tenant) or None,
            "run": use.run if use else getattr(answer, "run", None),
            "model": use.model[:MAX_NAME] if use else None,
            "end": (use and use.end) or None,
            "input_tokens": usage.input,
            "output_tokens": usage.output,
        }
        return {name: value for name, value in facts.items() if value is not None}

    return app
