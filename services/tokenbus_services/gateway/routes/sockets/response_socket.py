"""Responses over a WebSocket: each frame `response.create` is one response, whose events are frames.

Frames are answered in turn. Closing the socket is the only cancel: it ends the response that is under way, and drops
those that wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from typing import TypeAlias

import msgspec
import structlog
from starlette.websockets import WebSocket, WebSocketDisconnect

from tokenbus.bus.liveness import stop_task
from tokenbus.client.decode import is_end
from tokenbus.errors import Malformed, TokenbusError
from tokenbus.events.public import UnknownEvent
from tokenbus_services.gateway.audit import AuditedRun, FrameAudit
from tokenbus_services.gateway.callers import Caller
from tokenbus_services.gateway.gateway import Gateway, HeldFrame
from tokenbus_services.gateway.http_request import response_to
from tokenbus_services.gateway.problem import Problem, Refusal, defect, invalid, of_exception, unsupported
from tokenbus_services.gateway.routes.sockets import handshake
from tokenbus_services.gateway.runs import GatewayRun
from tokenbus_services.gateway.surfaces.contract import GatewayRequest, Translated
from tokenbus_services.gateway.surfaces.errors import openai_error
from tokenbus_services.gateway.surfaces.fields import json_body
from tokenbus_services.gateway.surfaces.openai_responses.response_log import ResponseFrames
from tokenbus_services.gateway.surfaces.surface import Surface

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

Translate: TypeAlias = Callable[[Caller, GatewayRequest], Awaitable[Translated]]
MAX_WAITING = 16
"""Requests that may wait for their turn on one socket."""
_encode = msgspec.json.Encoder().encode


class ResponseSocket:
    """One client's connection."""

    def __init__(self, gateway: Gateway, surface: Surface, translate: Translate, websocket: WebSocket) -> None:
        self._gateway = gateway
        self._surface = surface
        self._translate = translate
        self._socket = websocket
        self._headers: dict[str, str] = {}
        self._waiting: asyncio.Queue[tuple[bytes, HeldFrame]] = asyncio.Queue(MAX_WAITING)
        self._client_left = False

    async def serve(self) -> None:
        """Serve the connection until it is closed."""
        scope = self._socket.scope
        try:
            self._headers = handshake.handshake_headers(self._socket)
            handshake.check_origin(self._headers, self._gateway.settings.origins)
            self._gateway.enter(scope, (await self._caller()).key)
        except Refusal as e:
            await handshake.deny(self._socket, response_to(e.problem, self._surface.refusal, scope))
            return
        except TokenbusError as e:
            await handshake.deny(self._socket, response_to(of_exception(e), self._surface.refusal, scope))
            return
        try:
            await self._socket.accept()
            answering = asyncio.create_task(self._answer_all(), name="answers of a socket")
            try:
                await self._read(answering)
            except WebSocketDisconnect:  # while it was told that a frame is refused
                self._client_left = True
            finally:
                await stop_task(answering)
        finally:
            while not self._waiting.empty():
                self._waiting.get_nowait()[1].release()
            self._gateway.leave(scope)

    async def _caller(self) -> Caller:
        """Who asks now: the handshake's key may have been revoked or rotated meanwhile. Raises Refusal (401, 403)."""
        caller = await self._gateway.access.identify(self._headers)
        caller.may_use(self._surface.name)
        return caller

    async def _read(self, answering: asyncio.Task[None]) -> None:
        """Put the client's frames into the queue until it leaves, or answering has ended."""
        while not answering.done():
            receiving = asyncio.ensure_future(self._socket.receive())
            try:
                await asyncio.wait((receiving, answering), return_when=asyncio.FIRST_COMPLETED)
                if not receiving.done():
                    return
                message = receiving.result()
            finally:
                receiving.cancel()
            if message["type"] == "websocket.disconnect":
                self._client_left = message.get("code") != handshake.SERVER_STOPS
                return
            given = message.get("text") or message.get("bytes") or ""
            data = given.encode() if isinstance(given, str) else given
            if self._waiting.full():
                why = f"more than {MAX_WAITING} requests wait on this socket"
                await self._send_error(Problem(status=429, code="too_many_requests", message=why, kind="rate_limit"))
                continue
            try:
                self._waiting.put_nowait((data, self._gateway.hold_frame(self._socket, len(data))))
            except Refusal as e:
                await self._send_error(e.problem)

    async def _answer_all(self) -> None:
        with suppress(WebSocketDisconnect):  # the client has disconnected while a frame was sent
            while True:
                frame, held = await self._waiting.get()
                with self._gateway.frame_audit(self._surface.name, method="CREATE") as audit:
                    try:
                        audit.caller = caller = await self._caller()
                        opened, cancels = await self._publish(caller, frame)
                        frame = b""
                        held.release()
                        await self._answer(opened, audit, cancels=cancels)
                    except Refusal as e:
                        await self._send_error(e.problem, audit)
                        if audit.caller is None:
                            await self._socket.close(handshake.MISUSED, "the key of this socket is not valid any more")
                            return
                    except TokenbusError as e:
                        await self._send_error(of_exception(e), audit)
                    except WebSocketDisconnect:
                        raise
                    except Exception:
                        log.exception("answer_failed")
                        await self._send_error(defect(), audit)
                    finally:
                        held.release()

    async def _publish(self, caller: Caller, frame: bytes) -> tuple[GatewayRun, bool]:
        """The run of one frame, and whether it ends with its client. Raises Refusal, TokenbusError."""
        asked = GatewayRequest(body=self._body(frame), headers=self._headers)
        translated = await self._translate(caller, asked)
        opened = await self._gateway.runs.publish(caller, self._surface, asked, translated)
        return opened, translated.on_disconnect == "cancel"

    async def _answer(self, opened: GatewayRun, audit: FrameAudit, *, cancels: bool) -> None:
        """Send the response of a run. Raises Refusal, TokenbusError."""
        runs = self._gateway.runs
        audit.use = use = AuditedRun(run=opened.id, model=opened.note.model, span=opened.span)
        encoder = ResponseFrames(opened.note, opened.id)
        ended = False
        try:
            followed = self._gateway.follow(self._surface, opened.id, opened.caller.key, new=not opened.joined)
            async with aclosing(use.watched(followed)) as events:
                async for event in events:
                    ended = is_end(event)
                    for data in encoder.feed(event):
                        await self._send(data)
                    if ended and isinstance(event, UnknownEvent):
                        raise Malformed(
                            f"run {opened.id}", "its terminal event is of a type that this gateway does not know"
                        )
        except TokenbusError as e:
            for data in encoder.broken(of_exception(e)):
                await self._send(data)
        except WebSocketDisconnect:
            self._client_left = True
            raise
        finally:
            if self._client_left and not ended and cancels:
                runs.client_gone(opened)
            runs.leave(opened)

    def _body(self, frame: bytes) -> bytes:
        """The body of the request that a frame holds. Raises Refusal."""
        most = self._gateway.settings.body_bytes
        if len(frame) > most:
            why = f"the frame has more than {most} bytes"
            raise Refusal(Problem(status=413, code="request_too_large", message=why, kind="invalid_request"))
        body = json_body(frame)
        if body.pop("type", None) != "response.create":
            raise unsupported("type", "frames of other types than 'response.create' are not supported")
        if body.get("background"):
            raise invalid("background", "a response over a WebSocket cannot run in the background")
        return _encode({**body, "stream": True})

    async def _send(self, data: bytes) -> None:
        """Send a frame. Raises WebSocketDisconnect if the client has gone, or reads nothing."""
        try:
            async with asyncio.timeout(self._gateway.settings.send_timeout_s):
                await handshake.send_text(self._socket, data)
        except TimeoutError:
            with suppress(RuntimeError):
                await self._socket.close(handshake.MISUSED)
            raise WebSocketDisconnect(handshake.MISUSED) from None

    async def _send_error(self, problem: Problem, audit: FrameAudit | None = None) -> None:
        if audit:
            audit.status = problem.status
        await self._send(_encode({"type": "error", "status": problem.status, "error": openai_error(problem)}))
