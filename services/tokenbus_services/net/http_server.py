"""uvicorn's HTTP protocol with limits, so that no client can hold a connection without using it.

uvicorn closes only idle keep-alive connections. A client that sends half a request, or one byte per hour, or never
reads its response, keeps its connection forever. Each costs a file descriptor, and a worker without descriptors cannot
reach its Redis server. Here head, body and response each have a time limit. If a service is at its connection limit,
the connection that has waited longest without a complete request is closed, so that health probes still get through.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum
from typing import Any, ClassVar, cast

import h11
import msgspec
import structlog
from uvicorn.protocols.http.h11_impl import H11Protocol

_log = structlog.stdlib.get_logger()

_SAY_AGAIN_S = 10.0
_TIMED_OUT = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class HttpBounds(msgspec.Struct, frozen=True, kw_only=True):
    """Limits per connection, and the number of connections."""

    connections: int = 256
    head_s: float = 10.0
    """From the connection, or the previous response, to the end of the request head."""
    body_window_s: float = 60.0
    body_window_bytes: int = 64 * 2**10
    """An incomplete body must bring this many bytes per time window."""
    answer_s: float = 30.0
    """Maximum time in which a client reads nothing of a waiting response."""


class _Phase(Enum):
    HEAD = "head"
    BODY = "body"
    OURS = "ours"
    """The request is complete: the service must respond, and the client waits."""


class BoundedProtocol(H11Protocol):
    """One connection, restricted by ``bounds``."""

    _say_full_at: ClassVar[float] = 0.0
    """Rate limit of the log: a flood of connections must not become a flood of log lines."""

    def __init__(self, *, bounds: HttpBounds, **options: Any) -> None:
        super().__init__(**options)
        self._bounds = bounds
        self._phase = _Phase.OURS
        self._since = 0.0
        self._window_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._follow()
        if len(self.connections) > self._bounds.connections:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        self._window_bytes += len(data)
        super().data_received(data)
        self._follow()

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
        return self._since if self._phase is _Phase.HEAD else None

    def _follow(self) -> None:
        """Start the timer of the connection's current phase, if the phase has changed."""
        if self.transport.is_closing():
            return
        theirs: Any = self.conn.their_state
        phase = _Phase.HEAD if theirs is h11.IDLE else _Phase.BODY if theirs is h11.SEND_BODY else _Phase.OURS
        if phase is self._phase:
            return
        self._phase = phase
        self._timer = _cancelled(self._timer)
        self._since, self._window_bytes = self.loop.time(), 0
        if phase is _Phase.HEAD:
            self._timer = self.loop.call_later(self._bounds.head_s, self._cut)
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
        in_request = self._window_bytes > 0 or self._phase is _Phase.BODY
        answering = self._phase is _Phase.BODY and self.cycle.response_started
        if in_request and not answering:
            self.transport.write(_TIMED_OUT)
        self.transport.close()
        self._abort_later()

    def _abort_later(self) -> None:
        if self._unread is None:
            self._unread = self.loop.call_later(self._bounds.answer_s, self.transport.abort)

    def _make_room(self) -> None:
        """Close the connection that has waited longest for a complete request; this one if all others are busy."""
        others = [c for c in self.connections if isinstance(c, BoundedProtocol) and c is not self]
        waiting = [(since, c) for c in others if (since := c.waiting_since) is not None]
        gone = min(waiting, key=lambda entry: entry[0])[1] if waiting else self
        gone.transport.abort()
        now = self.loop.time()
        if now >= BoundedProtocol._say_full_at:
            BoundedProtocol._say_full_at = now + _SAY_AGAIN_S
            _log.warning("http_connections_full", most=self._bounds.connections, refused=gone is self)


def bounded(bounds: HttpBounds) -> type[asyncio.Protocol]:
    """Return the protocol factory for uvicorn's ``http`` option."""

    def protocol(**options: Any) -> BoundedProtocol:
        return BoundedProtocol(bounds=bounds, **options)

    return cast(type[asyncio.Protocol], cast(Callable[..., asyncio.Protocol], protocol))


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer:
        timer.cancel()
