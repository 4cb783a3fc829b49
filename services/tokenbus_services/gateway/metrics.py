"""The gateway's metrics. No label holds a name from a request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class GatewayMetrics:
    """Answers by surface and status, and the open ones."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._answers = Counter(
            "tokenbus_gateway_answers",
            "Answers begun, by surface and HTTP status.",
            ["surface", "status"],
            registry=registry,
        )
        self._open = Gauge(
            "tokenbus_gateway_open_answers", "Answers in progress, streams above all.", ["surface"], registry=registry
        )

    def counted(self, surface: str, answer: Any) -> Any:
        """The same ASGI app, counted."""

        async def app(scope: MutableMapping[str, Any], receive: Any, send: Send) -> None:
            async def sent(message: MutableMapping[str, Any]) -> None:
                if message["type"] == "http.response.start":
                    self._answers.labels(surface, str(message["status"])).inc()
                await send(message)

            self._open.labels(surface).inc()
            try:
                await answer(scope, receive, sent)
            finally:
                self._open.labels(surface).dec()

        return app
