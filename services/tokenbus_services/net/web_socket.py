"""uvicorn's WebSocket protocol with limits on the size of an incomplete message and on the time it may take."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

import structlog
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode

_log = structlog.stdlib.get_logger()

OWNER = "tokenbus.owner"
"""Key in the state of an ASGI scope: whose share the request or socket uses. The app sets it once it is known."""
ANSWERING = "tokenbus.answering"
"""Key in the same state: true while the app sends an answer. The socket is then not closed because its server stops."""
SERVER_STOPS = "tokenbus.server_stops"
"""Key in the same state: true once the server, and not the client, closes the socket."""
UNKNOWN = ""
"""The owner of all sockets whose client is not known yet."""
_SLICE = 4096
"""Bytes parsed at once. They hold up to 700 frames, which cost 10 ms."""
_MANY_FRAMES = 64
_SLOW_S = 0.05
"""Pause after a slice with many frames. No client needs so many, and parsing them would take all CPU time."""
_FREE = 16 * 1024
"""Bytes of an incomplete message that every socket may hold in addition."""
_LOOK_S = 0.1
"""How often a socket of a server that stops looks whether its answer has ended."""
_MAX_LINE = 8000
_MAX_HEADERS = 100


def handshake_problem(method: bytes, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Why a request with `Upgrade: websocket` is no handshake. The parser would answer none of these."""
    given: dict[bytes, bytes] = {}
    count = 0
    for name, value in headers:
        given.setdefault(name, value)
        count += 1
        if len(name) + len(value) > _MAX_LINE:
            return f"a header of a WebSocket handshake may have {_MAX_LINE} bytes"
    if method != b"GET":
        return "a WebSocket handshake is a GET"
    if given.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in given:
        return "a WebSocket handshake has no body"
    if given.get(b"sec-websocket-version") != b"13" or not given.get(b"sec-websocket-key"):
        return "a WebSocket handshake needs Sec-WebSocket-Key and Sec-WebSocket-Version 13"
    if count > _MAX_HEADERS:
        return f"a WebSocket handshake may have {_MAX_HEADERS} headers"
    return None


class BoundedSocket(WebSocketsSansIOProtocol):
    """One WebSocket. ``unfinished``: the bytes of incomplete messages, divided among the owners of all sockets.

    An incomplete message must bring ``window_bytes`` per ``window_s``, and a client must not leave what is sent to it
    unread for ``answer_s``.
    """

    def __init__(
        self, *, unfinished: FairShare, window_s: float, window_bytes: int, answer_s: float, **options: Any
    ) -> None:
        super().__init__(**options)
        self._unfinished = unfinished
        self._window_s = window_s
        self._window_bytes = window_bytes
        self._answer_s = answer_s
        self._pending = bytearray()
        """Received, and not parsed yet."""
        self._feeding: asyncio.Handle | None = None
        self._frames_seen = 0
        self._shares: tuple[str | None, int] = (UNKNOWN, 0)
        """What was taken from `unfinished`, and in whose name."""
        self._received = 0
        """In this time window."""
        self._window: asyncio.TimerHandle | None = None
        self._leaving: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def shutdown(self) -> None:
        """The server stops: close the socket, once the answer that it sends has ended."""
        if self.handshake_complete and self.scope.get("state", {}).get(ANSWERING) and not self.close_sent:
            self._leaving = self.loop.call_later(_LOOK_S, self.shutdown)
        else:
            self.close_now()

    def close_now(self) -> None:
        """Close the socket with 1012: the server stops."""
        if not self.disconnected:
            if self.handshake_complete:
                self.scope.setdefault("state", {})[SERVER_STOPS] = True
            super().shutdown()

    def data_received(self, data: bytes) -> None:
        if not self.handshake_initiated:
            super().data_received(data)
            return
        self._received += len(data)
        self._pending += data
        self._pause()
        if self._feeding is None:
            self._feed()

    async def receive(self) -> Any:
        message = await self.queue.get()
        if self._feeding is None:
            self._feed()
        return message

    async def send(self, message: Any) -> None:
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body"):
            self.handshake_complete = True  # else uvicorn logs an error for each socket that is refused

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(self._answer_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread:
            self._unread.cancel()
            self._unread = None
        if self._feeding is None:
            self._feed()

    def connection_lost(self, exc: Exception | None) -> None:
        for handle in (self._feeding, self._window, self._unread, self._leaving):
            if handle:
                handle.cancel()
        self._pending.clear()
        self.frames = []
        self._give_back()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if not self.handshake_initiated and self.conn.handshake_exc:
            self.send_500_response()
            self.transport.close()

    def handle_text(self, event: Any) -> None:
        self._frames_seen += 1
        super().handle_text(event)
        self._join()

    def handle_bytes(self, event: Any) -> None:
        self._frames_seen += 1
        super().handle_bytes(event)
        self._join()

    def handle_cont(self, event: Any) -> None:
        # One buffer: a list of a million pieces of one byte each would cost 60 times what the client sent.
        self._frames_seen += 1
        if self.frames:
            self.frames[0] += event.data
        else:
            self.frames = [bytearray(event.data)]  # type: ignore[list-item]
        if event.fin:
            self.send_receive_event_to_app()

    def handle_ping(self) -> None:
        self._frames_seen += 1
        super().handle_ping()

    def handle_pong(self, event: Any) -> None:
        self._frames_seen += 1
        super().handle_pong(event)

    def send_receive_event_to_app(self) -> None:
        data = bytes(self.frames[0])
        self.frames = []
        if self.close_sent:
            return
        if self.curr_msg_data_type == "bytes":
            self.queue.put_nowait({"type": "websocket.receive", "bytes": data})
            return
        try:
            self.queue.put_nowait({"type": "websocket.receive", "text": data.decode()})
        except UnicodeDecodeError:
            self._fail(CloseCode.INVALID_DATA, "a text frame is not UTF-8")

    def send_500_response(self) -> None:
        # The server stops: a defect of the app never gets this far.
        if self.initial_response or self.handshake_complete:
            return
        self.conn.send_response(self.conn.reject(HTTPStatus.SERVICE_UNAVAILABLE, "the server is stopping\n"))
        self.transport.write(b"".join(self.conn.data_to_send()))

    def _feed(self) -> None:
        """Parse the next slice, unless the app has a message to take first, or the client reads nothing."""
        self._feeding = None
        if self.disconnected or self.transport.is_closing() or not self.queue.empty() or not self.writable.is_set():
            return
        self._frames_seen = 0
        data = bytes(self._pending[:_SLICE])
        del self._pending[: len(data)]
        if data:
            super().data_received(data)
            self._check()
        if self._pending:
            pause_s = _SLOW_S if self._frames_seen > _MANY_FRAMES else 0.0
            self._feeding = self.loop.call_later(pause_s, self._feed) if pause_s else self.loop.call_soon(self._feed)
        elif self.queue.empty() and self.read_paused and not self.transport.is_closing():
            self.read_paused = False
            self.transport.resume_reading()

    def _check(self) -> None:
        """Take what the incomplete message holds from the share, and give it time limits."""
        if self.transport.is_closing():
            return
        size = len(self.conn.reader.buffer) + (len(self.frames[0]) if self.frames else 0)
        owner: str | None = self.scope.get("state", {}).get(OWNER, UNKNOWN)
        self._give_back()
        wanted = max(0, size - _FREE)
        if wanted and not self._unfinished.take(owner, wanted):
            _log.info("web_socket_refused", unfinished=self._unfinished.total)
            self._fail(CloseCode.TRY_AGAIN_LATER, "too many messages are incomplete: send this one again later")
            return
        self._shares = (owner, wanted)
        if size and self._window is None:
            self._received = 0
            self._window = self.loop.call_later(self._window_s, self._window_ends)
        elif not size and self._window:
            self._window.cancel()
            self._window = None

    def _window_ends(self) -> None:
        self._window = None
        if self._received < self._window_bytes and not self.read_paused:
            self._fail(CloseCode.POLICY_VIOLATION, "the message did not arrive in time")
            return
        self._received = 0
        self._window = self.loop.call_later(self._window_s, self._window_ends)

    def _fail(self, code: CloseCode, why: str) -> None:
        self.conn.fail(code, why)
        self.handle_parser_exception()

    def _give_back(self) -> None:
        owner, size = self._shares
        self._shares = (owner, 0)
        if size:
            self._unfinished.give_back(owner, size)

    def _join(self) -> None:
        if self.frames:  # the message has further fragments
            self.frames = [bytearray(self.frames[0])]  # type: ignore[list-item]

    def _pause(self) -> None:
        if not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()


class FairShare:
    """A capacity that owners take from and give back to. No IO.

    An owner may hold as much as remains free for everybody else, and no more. So a single owner can take half. If n
    owners take what they can, each has one part in n + 1, and the same is left for the next one.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: dict[str, int] = {}
        self._total = 0

    def take(self, owner: str | None, amount: int = 1) -> bool:
        """Take an amount, or return False. ``owner``: None if there are no others: it may take everything."""
        total = self._total + amount
        held = 0 if owner is None else self._held.get(owner, 0) + amount
        if total > self._capacity or held > self._capacity - total:
            return False
        self._total = total
        if owner is not None:
            self._held[owner] = held
        return True

    def give_back(self, owner: str | None, amount: int = 1) -> None:
        """Return what was taken."""
        self._total -= amount
        if owner is None:
            return
        self._held[owner] -= amount
        if not self._held[owner]:
            del self._held[owner]

    @property
    def total(self) -> int:
        """What all owners hold."""
        return self._total
