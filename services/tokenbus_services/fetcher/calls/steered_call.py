"""Calls whose answer takes in messages of its session while it comes: over a WebSocket, at providers that speak it.

The parser tells the fetcher over `control` that messages wait. The call sends them to the provider, which ends the
answer early and begins the next one on the same connection. With the end of the answer the attempt ends. The next
attempt, whose turn takes the messages in, reads the next answer, if this fetcher makes it in time, and if the turn has
the messages that the provider got, and no others. Otherwise the connection is closed, and that attempt is a call like
any other. So nothing that the provider does decides which messages a turn has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from typing import TYPE_CHECKING

import httpx
import msgspec
import structlog

from tokenbus.errors import RequestError
from tokenbus.events.requests import Generate, Message, TextPart
from tokenbus.providers.api import HttpCall, SteerApi, SteerSeen
from tokenbus_services.endpoints.endpoint import Endpoint
from tokenbus_services.net.http_client import trust

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

STEER_S = 10.0
"""How long a provider may take to end an answer that it steers. Then it is ended here, and another call follows."""
KEPT_S = 10.0
"""How long the next answer waits for the attempt that reads it."""
MOST_BYTES = 64 * 2**20
"""Of one message of a provider. Images are the largest."""
_OF_HTTP = (
    *("host", "connection", "accept", "accept-encoding"),
    *("content-length", "content-type", "transfer-encoding"),
)
"""Headers of a request that a handshake does not have, or has by itself."""

Waiting = Callable[[str], Awaitable[list[Message]]]
"""Reads the messages that wait to steer a run."""


class Socket(httpx.AsyncByteStream):
    """A WebSocket to a provider; and the answer that comes over it, as the body of server-sent events that HTTP has."""

    def __init__(self, connection: ClientConnection, api: SteerApi) -> None:
        self.steered = False
        """The answer has ended early, and the next one follows."""
        self.sent: list[Message] = []
        """What the answer was steered with."""
        self._connection = connection
        self._api = api
        self._response = ""
        self._event = b""
        """Received, and not yet read."""
        self._over = self._ends = False
        self._patience: asyncio.TimerHandle | None = None

    async def send(self, message: bytes) -> None:
        """Send a message. Raises httpx.TransportError."""
        from websockets.exceptions import ConnectionClosed

        try:
            await self._connection.send(message, text=True)
        except ConnectionClosed as e:
            raise httpx.WriteError(str(e)) from e

    async def head(self, request: httpx.Request) -> httpx.Response | None:
        """The head of an answer, as HTTP would have it: one that begins with an error has the error's status. None: the
        provider gives none. Raises httpx.TransportError.
        """
        self._forget_patience()
        self.steered, self.sent = False, []
        while not (seen := await self._receive()).passes:
            if seen.refused:
                return None
        self._over, self._response = seen.over, seen.response
        if seen.status:
            return httpx.Response(seen.status, content=self._event, request=request)
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=self, request=request)

    async def steer(self, messages: list[Message], body: bytes) -> None:
        """Steer the answer, which ends within `STEER_S`. ``body``: of a call with these messages alone. Raises
        httpx.TransportError.
        """
        self.sent = messages
        self._patience = asyncio.get_running_loop().call_later(STEER_S, self.end)
        await self.send(self._api.steer(self._response, body))

    def end(self) -> None:
        """End the answer, so that another call follows."""
        if not self._over:
            self._ends = True
            self.close()

    def close(self) -> None:
        """Close the connection at once."""
        self._forget_patience()
        self._connection.transport.abort()

    def __aiter__(self) -> Socket:
        return self

    async def __anext__(self) -> bytes:
        """The next event. Raises httpx.TransportError."""
        while not (self._event or self._over):
            try:
                seen = await self._receive()
            except httpx.TransportError:
                if not (self._ends or self.sent):
                    raise
                # Whatever the provider did with the messages: the next call has them.
                self._event, self._over = self._api.ended(self._response), True
                break
            if seen.refused:
                log.info("steering_refused", response=self._response)
                self.end()
            elif seen.passes:
                self._over = seen.over
                self.steered = seen.steered and bool(self.sent)
        if not self._event:
            raise StopAsyncIteration
        event, self._event = self._event, b""
        return b"".join(b"data: %b\n" % line for line in event.splitlines()) + b"\n"

    async def aclose(self) -> None:
        """Close the connection, unless the next answer follows on it."""
        if not self.steered:
            self.close()

    async def _receive(self) -> SteerSeen:
        """Read a message, and keep it if it is an event. Raises httpx.TransportError."""
        from websockets.exceptions import ConnectionClosed

        try:
            message = await self._connection.recv(decode=False)
        except ConnectionClosed as e:
            raise httpx.ReadError(str(e)) from e
        seen = self._api.read(message)
        if seen.passes:
            self._event = message
        return seen

    def _forget_patience(self) -> None:
        if self._patience:
            self._patience.cancel()
            self._patience = None


class SteeredCall:
    """The calls of one attempt, over a WebSocket."""

    def __init__(
        self,
        endpoint: Endpoint,
        request: Generate,
        kept: Socket | None,
        waiting: Callable[[], Awaitable[list[Message]]],
    ) -> None:
        """``kept`` has an answer to what the turn's messages say. ``waiting`` reads the messages that wait."""
        assert endpoint.api.steering
        self.socket: Socket | None = None
        self._endpoint = endpoint
        self._request = request
        self._api = endpoint.api.steering
        self._kept = kept
        self._waiting = waiting
        self._steering: asyncio.Task[None] | None = None

    async def send(self, call: HttpCall) -> httpx.Response:
        """Send the call; return the head of its answer. Raises as `Endpoint.request` and `Endpoint.send` do."""
        request = self._endpoint.request(call)
        await self._endpoint.authorise(request)
        if response := await self._next_answer(request):
            return response
        connected = await _connected(request, self._endpoint.settings.connect_timeout_s)
        if isinstance(connected, httpx.Response):
            return connected
        self.socket = Socket(connected, self._api)
        await self.socket.send(self._api.begin(call.body))
        if response := await self.socket.head(request):
            return response
        raise httpx.RemoteProtocolError("the provider refuses to steer an answer that has not begun")

    async def _next_answer(self, request: httpx.Request) -> httpx.Response | None:
        """The answer that was kept for this call; None if the provider does not give it."""
        self.socket, self._kept = self._kept, None
        if self.socket is None:
            return None
        with suppress(httpx.TransportError):
            if (response := await self.socket.head(request)) and response.status_code == HTTPStatus.OK:
                return response
        self.socket.close()
        return None

    def steer(self) -> None:
        """Steer the answer with the messages that wait."""
        if self._steering is None:
            self._steering = asyncio.create_task(self._steer(), name="steering")

    async def _steer(self) -> None:
        if self.socket is None:
            return
        try:
            messages = await self._waiting()
            if messages and all(map(_is_plain, messages)):
                asked = Generate(
                    provider=self._request.provider,
                    model=self._request.model,
                    messages=messages,
                    names_in_text=self._request.names_in_text,
                )
                await self.socket.steer(messages, self._endpoint.build(asked, []).call.body)
            else:
                self.socket.end()  # media go with a call of their own, and a message may have been withdrawn
        except (RequestError, httpx.TransportError):
            self.socket.end()

    def leave(self) -> Socket | None:
        """End the work; return the connection if another answer follows on it."""
        if self._steering:
            self._steering.cancel()
        if self._kept:
            self._kept.close()
        if self.socket and self.socket.steered:
            return self.socket
        if self.socket:
            self.socket.close()
        return None


class _Kept(msgspec.Struct, frozen=True):
    """A connection with the answer that an attempt should read."""

    socket: Socket
    turn: int
    attempt: int
    choice: int
    expiry: asyncio.TimerHandle


class SteeredCalls:
    """Those of one fetcher."""

    def __init__(self, waiting: Waiting) -> None:
        self._waiting = waiting
        self._calls: dict[tuple[str, int], SteeredCall] = {}
        self._kept: dict[str, _Kept] = {}

    @contextmanager
    def call(
        self, endpoint: Endpoint, request: Generate, run: str, place: tuple[int, int, int], steers: list[Message]
    ) -> Generator[SteeredCall]:
        """The calls of an attempt. ``place``: turn, attempt, and choice of the provider. ``steers``: messages of the
        session that the turn took in.
        """
        turn, attempt, choice = place
        kept = self._take(run)
        if kept and (kept.turn, kept.attempt, kept.choice, kept.socket.sent) != (turn - 1, attempt - 1, choice, steers):
            kept.socket.close()
            kept = None
        call = SteeredCall(endpoint, request, kept and kept.socket, lambda: self._waiting(run))
        self._calls[run, attempt] = call
        try:
            yield call
        finally:
            del self._calls[run, attempt]
            if socket := call.leave():
                expiry = asyncio.get_running_loop().call_later(KEPT_S, self.drop, run)
                self._kept[run] = _Kept(socket, turn, attempt, choice, expiry)

    def steer(self, run: str, attempt: int) -> None:
        """Steer the answer of an attempt, if this fetcher makes it."""
        if call := self._calls.get((run, attempt)):
            call.steer()

    def drop(self, run: str) -> None:
        """Close the connection that is kept for a run."""
        if kept := self._take(run):
            kept.socket.close()

    def close(self) -> None:
        """Close all connections that are kept."""
        for run in [*self._kept]:
            self.drop(run)

    def _take(self, run: str) -> _Kept | None:
        if kept := self._kept.pop(run, None):
            kept.expiry.cancel()
        return kept


def _is_plain(message: Message) -> bool:
    """Whether all of it fits into the message that steers."""
    content = message.content
    return message.role == "user" and (isinstance(content, str) or all(isinstance(part, TextPart) for part in content))


async def _connected(request: httpx.Request, timeout_s: float) -> ClientConnection | httpx.Response:
    """Connect to where the request goes; or return the answer that refuses it. Raises httpx.TransportError."""
    from websockets.asyncio.client import connect
    from websockets.exceptions import InvalidStatus, WebSocketException

    class Connect(connect):
        """Takes a redirect for the refusal that it is, as a call over HTTP does: the key goes to no other place."""

        def process_redirect(self, exc: Exception) -> Exception:
            return exc

    secure = request.url.scheme == "https"
    try:
        return await Connect(
            str(request.url.copy_with(scheme="wss" if secure else "ws")),
            additional_headers=[(n, v) for n, v in request.headers.multi_items() if n not in _OF_HTTP],
            user_agent_header=None,
            compression=None,
            open_timeout=timeout_s,
            max_size=MOST_BYTES,
            max_queue=1,
            ssl=trust() if secure else None,
        )
    except InvalidStatus as e:
        refusal = e.response
        headers = [
            (n, v) for n, v in refusal.headers.raw_items() if n.lower() not in ("content-encoding", "transfer-encoding")
        ]
        return httpx.Response(refusal.status_code, headers=headers, content=bytes(refusal.body or b""), request=request)
    except TimeoutError as e:
        raise httpx.ConnectTimeout(str(e)) from e
    except (OSError, WebSocketException, ImportError) as e:  # the latter: a SOCKS proxy needs a package
        raise httpx.ConnectError(str(e)) from e
