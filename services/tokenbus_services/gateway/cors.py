"""Which web pages may call the gateway. Off unless origins are listed. Preflights need no key."""

from __future__ import annotations

from collections.abc import Collection, MutableMapping
from typing import Any

from tokenbus_services.gateway.http_request import AsgiApp

_HEADERS = frozenset(
    {
        *("accept", "authorization", "content-type", "idempotency-key", "last-event-id", "x-api-key", "x-goog-api-key"),
        *("anthropic-version", "anthropic-beta", "anthropic-dangerous-direct-browser-access", "x-goog-api-client"),
        *("cache-control", "x-request-id", "user-agent", "if-none-match"),
    }
)
_PREFIXES = ("openai-", "x-stainless-", "x-tokenbus-")
_METHODS = "GET, POST, DELETE, HEAD"
_EXPOSED = ", ".join(
    (
        *("x-request-id", "request-id", "x-tokenbus-run", "retry-after", "retry-after-ms", "x-should-retry"),
        *(f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
        *("stream-next-offset", "stream-cursor", "stream-up-to-date", "stream-closed", "etag"),
    )
)
_VARY = (b"vary", b"Origin")


class WithCors:
    """ASGI middleware. Never allows credentials: keys travel in headers that the page sets itself."""

    def __init__(self, app: AsgiApp, *, origins: Collection[str]) -> None:
        self.app = app
        self._origins = frozenset(origin.lower() for origin in origins)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        headers = dict[bytes, bytes](scope["headers"]) if scope["type"] == "http" else {}
        origin = headers.get(b"origin", b"")
        if not origin:
            await self.app(scope, receive, send)
            return
        allowed = origin.decode("latin-1").lower() in self._origins
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
            requested = headers.get(b"access-control-request-headers", b"").decode("latin-1")
            answer = [_VARY, *(_preflight(origin, requested) if allowed else ())]
            await send({"type": "http.response.start", "status": 204 if allowed else 403, "headers": answer})
            await send({"type": "http.response.body"})
            return

        async def with_origin(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                more = [(b"access-control-allow-origin", origin), (b"access-control-expose-headers", _EXPOSED.encode())]
                message["headers"] = [*message.get("headers", ()), _VARY, *(more if allowed else ())]
            await send(message)

        await self.app(scope, receive, with_origin)


def _preflight(origin: bytes, requested: str) -> list[tuple[bytes, bytes]]:
    names = [name for each in requested.split(",") if _is_allowed(name := each.strip().lower())]
    return [
        (b"access-control-allow-origin", origin),
        (b"access-control-allow-methods", _METHODS.encode()),
        (b"access-control-allow-headers", ", ".join(names).encode("latin-1")),
        (b"access-control-max-age", b"600"),
    ]


def _is_allowed(header: str) -> bool:
    return header in _HEADERS or header.startswith(_PREFIXES)
