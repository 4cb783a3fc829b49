"""The WebSocket of `useChat`: requests of many chats over one connection, each answered by numbered parts.

A request is answered and resumed as over HTTP, and the client's `abort` reaches the run: it is cancelled. A connection
that closes leaves its runs alone, as a page that reloads comes back for them.

Browsers cannot set headers of a handshake, so a client's key may be in the headers that each of its frames has.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from functools import partial

import msgspec
import structlog
from starlette.websockets import WebSocket, WebSocketDisconnect

from tokenbus.client.decode import is_end
from tokenbus.errors import Malformed, TokenbusError
from tokenbus.events.public import PublicEvent, UnknownEvent
from tokenbus_services.gateway.audit import AuditedRun, FrameAudit
from tokenbus_services.gateway.callers import Caller
from tokenbus_services.gateway.gateway import HeldFrame
from tokenbus_services.gateway.http_request import headers_of, owner_of, response_to
from tokenbus_services.gateway.keys.access import key_in
from tokenbus_services.gateway.problem import Problem, Refusal, defect, of_exception
from tokenbus_services.gateway.routes.chats import STOPPED, Chats
from tokenbus_services.gateway.routes.sockets import handshake
from tokenbus_services.gateway.runs import GONE
from tokenbus_services.gateway.session_answers import SessionAnswer
from tokenbus_services.gateway.surfaces.ai_sdk_ui import frames
from tokenbus_services.gateway.surfaces.ai_sdk_ui.frames import Abort, ChunkFrames, Resume, Send
from tokenbus_services.gateway.surfaces.contract import Encoder, GatewayRequest
from tokenbus_services.gateway.surfaces.fields import check_size
from tokenbus_services.net.web_socket import ANSWERING, SERVER_STOPS, UNKNOWN

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

MAX_OPEN = 16
"""Requests of one connection that are answered at once."""
FIRST_FRAME_S = 10.0
"""A connection whose handshake had no key must send a request with one within this time."""
_VERSION = "7"
"""Of the `ai` package: earlier ones have no such transport."""
_SLOW = 1013


class _Waiting:
    """A frame until it is published."""

    def __init__(self, frame: Send | Resume, held: HeldFrame) -> None:
        self.frame = frame
        self.held = held


class ChatSocket:
    """One client's connection."""

    def __init__(self, chats: Chats, websocket: WebSocket) -> None:
        self._chats = chats
        self._gateway = chats.gateway
        self._socket = websocket
        self._headers: dict[str, str] = {}
        self._query = {"ui": _VERSION, **websocket.query_params}
        self._sending = asyncio.Lock()
        self._open: dict[str, asyncio.Task[None]] = {}
        """Requests that are being answered, by the client's id."""
        self._answers: dict[str, SessionAnswer] = {}
        """What they are answered with."""
        self._aborted: set[str] = set()
        """Those that the client stopped."""
        self._known = asyncio.Event()
        """The client has shown a valid key."""

    async def serve(self) -> None:
        """Serve the connection until it is closed."""
        refusal, scope = self._chats.surface.refusal, self._socket.scope
        try:
            self._headers = handshake.handshake_headers(self._socket)
            handshake.check_origin(self._headers, self._gateway.settings.origins)
            await self._identify_handshake()
        except Refusal as e:
            await handshake.deny(self._socket, response_to(e.problem, refusal, scope))
            return
        except TokenbusError as e:
            await handshake.deny(self._socket, response_to(of_exception(e), refusal, scope))
            return
        try:
            await self._serve()
        finally:
            self._gateway.leave(scope)

    async def _serve(self) -> None:
        await self._socket.accept()
        waiting = asyncio.create_task(self._close_if_unknown(), name="first frame of a chat socket")
        try:
            with suppress(WebSocketDisconnect, RuntimeError):  # the client has disconnected while a frame was sent
                await self._read()
        finally:
            tasks = [waiting, *self._open.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _identify_handshake(self) -> None:
        """Raises Refusal for a wrong key. Without one, each frame must bring its own."""
        try:
            owner = (await self._caller(self._headers)).key
        except Refusal:
            if key_in(self._headers):
                raise
            owner = UNKNOWN
        self._gateway.enter(self._socket.scope, owner)

    async def _caller(self, headers: Mapping[str, str]) -> Caller:
        caller = await self._gateway.access.identify(headers)
        caller.may_use(self._chats.surface.name)
        if owner_of(self._socket.scope) == UNKNOWN:
            self._gateway.enter(self._socket.scope, caller.key)
        self._known.set()
        return caller

    async def _close_if_unknown(self) -> None:
        try:
            async with asyncio.timeout(FIRST_FRAME_S):
                await self._known.wait()
        except TimeoutError:
            await self._socket.close(handshake.MISUSED, "no request with a valid key came")

    async def _read(self) -> None:
        """Begin what the client's frames ask for, until it leaves or sends what is not a frame."""
        while (message := await self._socket.receive())["type"] != "websocket.disconnect":
            given = message.get("text") or message.get("bytes") or ""
            data = given.encode() if isinstance(given, str) else given
            if len(data) > self._gateway.settings.body_bytes:
                await self._socket.close(handshake.MISUSED, "the frame is too large")
                return
            try:
                held = self._gateway.hold_frame(self._socket, len(data))
            except Refusal as e:
                await self._socket.close(_SLOW, e.problem.message)
                return
            try:
                check_size(data)
                frame = frames.decode(data)
            except Refusal as e:
                held.release()
                await self._socket.close(handshake.MISUSED, e.problem.message)
                return
            except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
                held.release()
                await self._socket.close(handshake.MISUSED, "invalid frame")
                return
            request = frame.request_id
            if not isinstance(frame, Abort) and request not in self._open and len(self._open) < MAX_OPEN:
                answer = self._answer(_Waiting(frame, held))
                self._open[request] = asyncio.create_task(answer, name="answer of a chat socket")
                self._socket.scope["state"][ANSWERING] = True
                continue
            held.release()
            if isinstance(frame, Abort):
                self._abort(request)
            elif request in self._open:
                await self._socket.close(handshake.MISUSED, "a requestId was used twice")
                return
            else:
                await self._tell(frames.error(request, f"More than {MAX_OPEN} requests are open."))

    def _abort(self, request: str) -> None:
        """Cancel the run of a request. What is still sent for it the client ignores."""
        if request in self._open:
            self._aborted.add(request)
        if answer := self._answers.get(request):
            answer.stop_later(STOPPED)

    async def _answer(self, waiting: _Waiting) -> None:
        request = waiting.frame.request_id
        with self._gateway.frame_audit(self._chats.surface.name, method=waiting.frame.kind) as audit:
            given: dict[str, str] = {}
            try:
                given = headers_of(waiting.frame.headers)
                headers = {**self._headers, **given}
                audit.caller = caller = await self._caller(headers)
                with self._gateway.place(caller.key):
                    asked = GatewayRequest(body=b"", headers=headers, query=self._query)
                    if isinstance(waiting.frame, Send):
                        await self._send(waiting, caller, asked, audit)
                    else:
                        await self._resume(waiting.frame, caller, asked, audit)
            except Refusal as e:
                await self._refuse(request, e.problem, audit)
                if audit.caller is None and key_in(self._headers) and not key_in(given):
                    with suppress(RuntimeError):
                        await self._socket.close(handshake.MISUSED, "the key of this socket is not valid any more")
            except TokenbusError as e:
                await self._refuse(request, of_exception(e), audit)
            except TimeoutError:  # the client reads nothing
                with suppress(RuntimeError):
                    await self._socket.close(_SLOW, "the client reads too slowly")
            except WebSocketDisconnect:  # it has gone
                pass
            except Exception:
                log.exception("answer_failed")
                await self._refuse(request, defect(), audit)
            finally:
                waiting.held.release()
                self._open.pop(request, None)
                self._socket.scope["state"][ANSWERING] = bool(self._open)
                self._answers.pop(request, None)
                self._aborted.discard(request)

    async def _send(self, waiting: _Waiting, caller: Caller, asked: GatewayRequest, audit: FrameAudit) -> None:
        request = waiting.frame.request_id
        answer, cancels = await self._say(waiting, caller, asked)
        ended = False
        if request in self._aborted:  # while it was said
            answer.stop_later(STOPPED)
        try:
            await self._answered(request, answer, asked, audit)
            ended = True
        finally:
            if not ended and cancels and not self._socket.scope["state"].get(SERVER_STOPS):
                answer.stop_later(GONE)
            answer.left()

    async def _say(self, waiting: _Waiting, caller: Caller, asked: GatewayRequest) -> tuple[SessionAnswer, bool]:
        """What a frame says, which is dropped then, and whether its answer ends with its client."""
        frame, waiting.frame = waiting.frame, Resume(request_id=waiting.frame.request_id, id=waiting.frame.id)
        assert isinstance(frame, Send)
        begun = await self._chats.begin(caller, frame.asked(asked.headers, asked.query))
        waiting.held.release()
        return begun

    async def _resume(self, frame: Resume, caller: Caller, asked: GatewayRequest, audit: FrameAudit) -> None:
        answer = await self._chats.open_answer(caller, frame.id)
        if answer is None:
            audit.status = 204
            await self._tell(frames.frame("no-active", frame.request_id))
            return
        after = -1 if frame.last_sequence is None else frame.last_sequence
        await self._answered(frame.request_id, answer, asked, audit, after=after)

    async def _answered(
        self, request: str, answer: SessionAnswer, asked: GatewayRequest, audit: FrameAudit, *, after: int = -1
    ) -> None:
        self._answers[request] = answer
        audit.use = use = AuditedRun(run=answer.run, model=answer.note.model)
        encoder = partial(self._chats.encoder, asked, answer)
        await self._stream(request, use.watched(answer.events()), encoder, after=after)

    async def _stream(
        self,
        request: str,
        events: AsyncGenerator[PublicEvent],
        make_encoder: Callable[[PublicEvent], Encoder],
        *,
        after: int = -1,
    ) -> None:
        """Send a run as numbered chunks. Its errors are parts of the stream too."""
        encoder: Encoder | None = None
        chunks = ChunkFrames(request, after)
        await self._tell(frames.frame("start", request))
        try:
            async with aclosing(events):
                async for event in events:
                    encoder = encoder or make_encoder(event)
                    for data in chunks.of(encoder.feed(event)):
                        await self._tell(data)
                    if is_end(event) and isinstance(event, UnknownEvent):
                        raise Malformed(f"run {event.run}", "its terminal event is of a type that is not known here")
        except TokenbusError as e:
            if encoder is None:
                raise
            for data in chunks.of(encoder.broken(of_exception(e))):
                await self._tell(data)
        await self._tell(frames.frame("end", request))

    async def _refuse(self, request: str, problem: Problem, audit: FrameAudit) -> None:
        audit.status = problem.status
        with suppress(WebSocketDisconnect, TimeoutError):
            await self._tell(frames.error(request, self._chats.surface.refusal(problem).body.decode()))

    async def _tell(self, data: bytes) -> None:
        async with asyncio.timeout(self._gateway.settings.send_timeout_s), self._sending:
            await handshake.send_text(self._socket, data)
