"""The gateway's metrics. No label holds a name from a request: keys are those of the deployment, up to a number."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

from tokenbus.events.usage import Usage

MAX_KEYS = 200
"""Keys with a label of their own; further ones share one."""
OTHER_KEYS = "other"

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

        self._key_answers = Counter(
            "tokenbus_gateway_key_answers",
            "Answers ended, by the id of the client's key and HTTP status.",
            ["key", "status"],
            registry=registry,
        )
        self._key_tokens = Counter(
            "tokenbus_gateway_key_tokens",
            "Tokens of runs whose answer was delivered to its end, by the id of the client's key.",
            ["key", "kind"],
            registry=registry,
        )
        self._keys: set[str] = set()

    def of_key(self, key: str, status: int, usage: Usage) -> None:
        """Count an answer that has ended."""
        if key not in self._keys:
            if len(self._keys) < MAX_KEYS:
                self._keys.add(key)
            else:
                key = OTHER_KEYS
        self._key_answers.labels(key, str(status)).inc()
        self._key_tokens.labels(key, "input").inc(usage.input or 0)
        self._key_tokens.labels(key, "output").inc(usage.output or 0)

    def frame_begun(self, surface: str) -> None:
        """Count a request of a WebSocket among the open answers."""
        self._open.labels(surface).inc()

    def frame_ended(self, surface: str, status: int) -> None:
        """Count the answer to a request of a WebSocket, which has ended."""
        self._open.labels(surface).dec()
        self._answers.labels(surface, str(status)).inc()

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
