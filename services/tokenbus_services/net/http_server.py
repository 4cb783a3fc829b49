"""uvicorn's HTTP protocol with limits, so that no client can hold a connection without using it.

uvicorn closes only idle keep-alive connections. A client that sends half a request, or one byte per hour, or never
reads its response, keeps its connection forever. Each costs a file descriptor, and a worker without descriptors cannot
reach its Redis server. Here head, body and response each have a time limit. At the connection limit, the connection
that has waited longest without a complete request is closed. If every connection has one, a few more are accepted, for
health probes alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum
from functools import partial
from http import HTTPStatus
from typing import Any, ClassVar, cast

import h11
import msgspec
import structlog
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from tokenbus_services.net.web_socket import BoundedSocket, FairShare, handshake_problem

_log = structlog.stdlib.get_logger()

PROBES = frozenset({"/health", "/ready", "/metrics"})
"""Paths that are answered also beyond the connection limit."""
_SAY_AGAIN_S = 10.0
_LINGER_S = 2.0
"""How long the rest of a body may take whose request is answered already. The connection is kept if it ends in time."""


ENDLESS = "endless answer"
"""Name of the task of an answer that has no end of its own, such as a subscription: it ends when its server stops."""


class HttpBounds(msgspec.Struct, frozen=True, kw_only=True):
    """Limits per connection, and the number of connections."""

    connections: int = 256
    probes: int = 16
    """Connections beyond `connections`, for health probes alone."""
    head_s: float = 10.0
    """From the connection, or the previous response, to the end of the request head."""
    body_window_s: float = 60.0
    body_window_bytes: int = 64 * 2**10
    """An incomplete body, or message of a WebSocket, must bring this many bytes per time window."""
    answer_s: float = 30.0
    """Maximum time in which a client reads nothing of a waiting response."""
    message_bytes: int = 2**20
    """Maximum size of a WebSocket's message."""
    unfinished_bytes: int = 64 * 2**20
    """All WebSockets' messages that are not complete."""


class _Phase(Enum):
    HEAD = "head"
    BODY = "body"
    REST = "rest"
    """The request is answered, and its body still arrives."""
    OURS = "ours"
    """The request is complete: the service must respond, and the client waits."""


class _Parser(h11.Connection):
    """Refuses a request whose length two parsers could read differently."""

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {bytes(name) for name, _ in event.headers}
            if {b"content-length", b"transfer-encoding"} <= names:
                raise h11.RemoteProtocolError("Content-Length and Transfer-Encoding")
        return event


class BoundedProtocol(H11Protocol):
    """One connection, restricted by ``bounds``."""

    _say_full_at: ClassVar[float] = 0.0
    """Rate limit of the log: a flood of connections must not become a flood of log lines."""

    def __init__(self, *, bounds: HttpBounds, **options: Any) -> None:
        super().__init__(**options)
        self.conn = _Parser(h11.SERVER)
        self._bounds = bounds
        self._phase = _Phase.OURS
        self._since = 0.0
        self._window_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._upgraded = False
        self._probing = False
        """Accepted beyond the limit: only a health probe is answered."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._follow()
        if len(self.connections) > self._bounds.connections:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        self._window_bytes += len(data)
        super().data_received(data)
        self._follow()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        if self._probing:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "connections_full", "this service has no free connection")
            return
        if problem := handshake_problem(event.method, self.headers):
            self._refuse(HTTPStatus.BAD_REQUEST, "invalid_handshake", problem)
            return
        self._upgraded = True  # from here on the transport is the WebSocket's, and so are its time limits
        self._timer = _cancelled(self._timer)
        super().handle_websocket_upgrade(event)

    def send_400_response(self, msg: str) -> None:
        self._refuse(HTTPStatus.BAD_REQUEST, "invalid_http", "this is not a valid HTTP request")

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._follow()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._abort_later()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread = _cancelled(self._unread)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._abort_later()  # a client that reads nothing would keep a closed connection open

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer, self._unread = _cancelled(self._timer), _cancelled(self._unread)
        super().connection_lost(exc)

    @property
    def waiting_since(self) -> float | None:
        """Time since which this connection has waited for a request head; None while it has a request."""
        return self._since if self._phase in (_Phase.HEAD, _Phase.REST) else None

    def _should_upgrade(self) -> bool:
        # Called once per request, before its task is made.
        if self._probing and self.scope["path"] not in PROBES:
            self.app = _no_connection_left
        return super()._should_upgrade()

    def _follow(self) -> None:
        """Start the timer of the connection's current phase, if the phase has changed."""
        if self._upgraded or self.transport.is_closing():
            return
        theirs: Any = self.conn.their_state
        phase = _Phase.HEAD if theirs is h11.IDLE else _Phase.BODY if theirs is h11.SEND_BODY else _Phase.OURS
        if phase is _Phase.BODY and self.conn.our_state is h11.DONE:
            phase = _Phase.REST
        if phase is self._phase:
            return
        self._phase = phase
        self._timer = _cancelled(self._timer)
        self._since, self._window_bytes = self.loop.time(), 0
        if phase is _Phase.HEAD:
            self._timer = self.loop.call_later(self._bounds.head_s, self._cut)
        elif phase is _Phase.REST:
            self._timer = self.loop.call_later(_LINGER_S, self._close)
        elif phase is _Phase.BODY:
            self._timer = self.loop.call_later(self._bounds.body_window_s, self._next_window)

    def _next_window(self) -> None:
        # While the service itself does not read, the client cannot send.
        if self._window_bytes < self._bounds.body_window_bytes and not self.flow.read_paused:
            self._cut()
            return
        self._window_bytes = 0
        self._timer = self.loop.call_later(self._bounds.body_window_s, self._next_window)

    def _cut(self) -> None:
        """The client was too slow: close the connection, with a 408 if a request has begun and no response has."""
        _log.info("http_request_cut", phase=self._phase.value)
        if self._window_bytes > 0 or self._phase is _Phase.BODY:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, "request_timeout", "the request did not arrive in time")
        else:
            self._close()

    def _refuse(self, status: HTTPStatus, code: str, message: str) -> None:
        """Close the connection; with this answer, unless another one has begun."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(_refusal(status, code, message))
        self._close()

    def _close(self) -> None:
        self.transport.close()
        self._abort_later()

    def _abort_later(self) -> None:
        if self._unread is None:
            self._unread = self.loop.call_later(self._bounds.answer_s, self.transport.abort)

    def _make_room(self) -> None:
        """Close the connection that has waited longest for a complete request. If all others are busy, this one is for
        a health probe, or is closed.
        """
        others = [c for c in self.connections if isinstance(c, BoundedProtocol) and c is not self]
        waiting = [(c._probing, since, c) for c in others if (since := c.waiting_since) is not None]
        oldest = min(waiting, key=lambda entry: entry[:2], default=None)
        full = oldest is None or oldest[0]
        """All other connections have a request, but for those that were accepted for a probe."""
        if full:
            self._probing = True
        if not full or len(self.connections) > self._bounds.connections + self._bounds.probes:
            (oldest[2] if oldest else self).transport.abort()
        now = self.loop.time()
        if now >= BoundedProtocol._say_full_at:
            BoundedProtocol._say_full_at = now + _SAY_AGAIN_S
            _log.warning("http_connections_full", most=self._bounds.connections, refused=full)


def server_config(
    app: Any,
    bounds: HttpBounds,
    *,
    connection: Callable[..., BoundedProtocol] = BoundedProtocol,
    web_sockets: bool = False,
    grace_s: int,
    kept_s: int = 5,
) -> uvicorn.Config:
    """uvicorn's options for an app. ``grace_s``: how long requests in progress may take once it stops. ``kept_s``: how
    long an idle connection is kept.

    Headers of proxies are not believed: anybody can send them.
    """

    unfinished = FairShare(bounds.unfinished_bytes)

    def socket(**options: Any) -> BoundedSocket:
        return BoundedSocket(
            unfinished=unfinished,
            window_s=bounds.body_window_s,
            window_bytes=bounds.body_window_bytes,
            answer_s=bounds.answer_s,
            **options,
        )

    return uvicorn.Config(
        app,
        interface="asgi3",
        http=_as_class(partial(connection, bounds=bounds)),
        ws=_as_class(socket) if web_sockets else "none",
        ws_max_size=bounds.message_bytes,
        ws_per_message_deflate=False,
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=kept_s,
        timeout_graceful_shutdown=grace_s,
    )


def _as_class(factory: Callable[..., asyncio.Protocol]) -> type[asyncio.Protocol]:
    return cast(type[asyncio.Protocol], factory)


async def _no_connection_left(scope: Any, receive: Any, send: Any) -> None:
    body = _body("connections_full", "this service has no free connection")
    headers = [(b"content-type", b"application/json"), (b"retry-after", b"1"), (b"connection", b"close")]
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _refusal(status: HTTPStatus, code: str, message: str) -> bytes:
    body = _body(code, message)
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\nconnection: close\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def _body(code: str, message: str) -> bytes:
    return msgspec.json.encode({"error": {"code": code, "message": message}})


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer:
        timer.cancel()
