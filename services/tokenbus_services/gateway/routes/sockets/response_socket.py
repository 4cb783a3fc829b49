"""Responses over a WebSocket: each frame `response.create` is one response, whose events are frames.

Frames are answered in turn. Closing the socket is the only cancel: it ends the response that is under way, and drops
those that wait.

A frame `response.steer` ends the response that is under way as `incomplete`, reason `steered`; its input begins the
next one, which has the settings of the first and continues it: https://developers.openai.com/api/docs/guides/steering
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeAlias, cast

import msgspec
import structlog
from starlette.websockets import WebSocket, WebSocketDisconnect

from tokenbus.bus.liveness import stop_task
from tokenbus.client.decode import is_end
from tokenbus.errors import Malformed, TokenbusError
from tokenbus.events.public import PublicEvent, UnknownEvent
from tokenbus_services.gateway.audit import AuditedRun, FrameAudit
from tokenbus_services.gateway.callers import Caller
from tokenbus_services.gateway.gateway import Gateway, HeldFrame
from tokenbus_services.gateway.http_request import response_to
from tokenbus_services.gateway.problem import Problem, Refusal, defect, invalid, of_exception, unsupported
from tokenbus_services.gateway.response_parts import Rest, decide, may_answer, name_of, of_part
from tokenbus_services.gateway.routes.sockets import handshake
from tokenbus_services.gateway.runs import GatewayRun
from tokenbus_services.gateway.surfaces.contract import GatewayRequest, Translated
from tokenbus_services.gateway.surfaces.errors import openai_error
from tokenbus_services.gateway.surfaces.fields import Fields, Json, json_body
from tokenbus_services.gateway.surfaces.openai_responses.input_items import messages_of
from tokenbus_services.gateway.surfaces.openai_responses.response_log import ResponseFrames
from tokenbus_services.gateway.surfaces.openai_responses.response_object import STEERED
from tokenbus_services.gateway.surfaces.surface import Surface
from tokenbus_services.net.web_socket import ANSWERING, SERVER_STOPS

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

Translate: TypeAlias = Callable[[Caller, GatewayRequest], Awaitable[Translated]]
MAX_WAITING = 16
"""Requests that may wait for their turn on one socket, and steers of one response."""
MAX_PARENTS = 64
"""Ended responses of one socket that are remembered."""
_STUBS = {"function_call": "function_call_output", "custom_tool_call": "custom_tool_call_output"}
_encode = msgspec.json.Encoder().encode


class Steer(msgspec.Struct, frozen=True):
    """What a client said to an open response."""

    id: str
    parent: str
    input: str | list[Any]

    @property
    def items(self) -> list[Any]:
        """The input as items."""
        return [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input


class OpenResponse:
    """The response that is under way."""

    def __init__(self, of: Rest, body: Json, encoder: ResponseFrames) -> None:
        self.id = name_of(of)
        self.run = of.run
        self.body = body
        self.encoder = encoder
        self.steers: list[Steer] = []

    def successor(self) -> bytes:
        """The frame of the response that goes on with what the client said."""
        said = [item for steer in self.steers for item in steer.items]
        return _encode({**self.body, "type": "response.create", "input": said, "previous_response_id": self.id})


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
        self._open: OpenResponse | None = None
        self._ended: dict[str, list[Steer]] = {}
        """Responses of this socket that have ended, with the steers that wait for what the client owes."""

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
                self._client_left = True
                return
            given = message.get("text") or message.get("bytes") or ""
            data = given.encode() if isinstance(given, str) else given
            if b"response.steer" in data and await self._steered(data):
                continue
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
                over = await self._answer_frame(frame, held)
                while over and over.steers:
                    over = await self._answer_frame(over.successor(), None, over.steers)

    async def _answer_frame(
        self, frame: bytes, held: HeldFrame | None, committing: Sequence[Steer] = ()
    ) -> OpenResponse | None:
        """Answer one frame; ``committing``: what the client said to the response before, which it begins with. Returns
        the response that is over.
        """
        with self._gateway.frame_audit(self._surface.name, method="STEER" if committing else "CREATE") as audit:
            try:
                audit.caller = caller = await self._caller()
                body = self._body(frame)
                if may_answer(frame) and (rest := await decide(self._gateway.runs, caller, body)):
                    if held:
                        held.release()
                    return await self._go_on(caller, rest, body, audit)
                frame = b""
                opened, cancels = await self._publish(caller, body)
                if held:
                    held.release()
                if (parent := str(body.get("previous_response_id"))) in self._ended:
                    self._ended[parent] = []
                return await self._answer(opened, body, audit, cancels=cancels)
            except Refusal as e:
                await self._refuse(e.problem, audit, committing)
                if audit.caller is None:
                    await self._socket.close(handshake.MISUSED, "the key of this socket is not valid any more")
                    raise WebSocketDisconnect(handshake.MISUSED) from None
            except TokenbusError as e:
                await self._refuse(of_exception(e), audit, committing)
            except WebSocketDisconnect:
                raise
            except Exception:
                log.exception("answer_failed")
                await self._refuse(defect(), audit, committing)
            finally:
                if held:
                    held.release()
        return None

    async def _refuse(self, problem: Problem, audit: FrameAudit, committing: Sequence[Steer]) -> None:
        audit.status = problem.status
        if not committing:
            await self._send_error(problem)
        for steer in committing:
            await self._steer_failed(steer.parent, steer.input, "successor_creation_failed", problem.message, steer.id)

    async def _publish(self, caller: Caller, body: Json) -> tuple[GatewayRun, bool]:
        """The run of one frame, and whether it ends with its client. Raises Refusal, TokenbusError."""
        asked = GatewayRequest(body=_encode(body), headers=self._headers)
        translated = await self._translate(caller, asked)
        opened = await self._gateway.runs.publish(caller, self._surface, asked, translated)
        return opened, translated.on_disconnect == "cancel"

    async def _answer(self, opened: GatewayRun, body: Json, audit: FrameAudit, *, cancels: bool) -> OpenResponse:
        """Send the response of a run. Returns it with what the client said that begins the next one. Raises Refusal,
        TokenbusError.
        """
        runs = self._gateway.runs
        audit.use = use = AuditedRun(run=opened.id, model=opened.note.model, span=opened.span)
        current = OpenResponse(Rest(opened.id, 0), body, ResponseFrames(opened.note, opened.id))
        followed = self._gateway.follow(self._surface, opened.id, opened.caller.key, new=not opened.joined)

        def over(*, left: bool) -> None:
            if left and cancels and not self._socket.scope["state"].get(SERVER_STOPS):
                runs.client_gone(opened)
            runs.leave(opened)

        return await self._send_all(current, use.watched(of_part(runs, opened.id, 0, followed)), over)

    async def _go_on(self, caller: Caller, rest: Rest, body: Json, audit: FrameAudit) -> OpenResponse:
        """Send the rest of a run that has waited for its client, and goes on without it."""
        runs, note = self._gateway.runs, (await self._gateway.runs.owned(rest.run, caller)).note
        if note is None:
            why = "another service began this run: go on with it over HTTP"
            raise Refusal(Problem(status=409, code="response_conflict", message=why, kind="invalid_request"))
        audit.use = use = AuditedRun(run=rest.run, model=note.model)
        current = OpenResponse(rest, body, ResponseFrames(note, rest.run, rest.part))
        followed = self._gateway.follow(self._surface, rest.run, caller.key)
        return await self._send_all(current, use.watched(of_part(runs, rest.run, rest.part, followed)))

    async def _send_all(
        self, current: OpenResponse, followed: AsyncGenerator[PublicEvent], over: Callable[..., None] | None = None
    ) -> OpenResponse:
        """Send a response. ``over`` is called once it is over, with whether its client left before its end."""
        encoder = current.encoder
        self._open = current
        state = self._socket.scope["state"]
        state[ANSWERING] = True
        ended = False
        try:
            async with aclosing(followed) as events:
                async for event in events:
                    ended = is_end(event)
                    for data in encoder.feed(event):
                        await self._send(data)
                    if ended and isinstance(event, UnknownEvent):
                        raise Malformed(
                            f"run {current.run}", "its terminal event is of a type that this gateway does not know"
                        )
        except TokenbusError as e:
            for data in encoder.broken(of_exception(e)):
                await self._send(data)
        except WebSocketDisconnect:
            self._client_left = True
            raise
        finally:
            self._open = None
            state[ANSWERING] = False
            if over:
                over(left=self._client_left and not ended)
        await self._over(current)
        return current

    # --- what is said to an open response -------------------------------------------------------------------------

    async def _steered(self, data: bytes) -> bool:
        """Take a frame `response.steer`; False if it is another frame."""
        try:
            body = json_body(data)
        except Refusal:
            return False
        if body.get("type") != "response.steer":
            return False
        parent, given, current = body.get("previous_response_id"), body.get("input"), self._open
        try:
            if len(data) > self._gateway.settings.body_bytes:
                raise invalid("input", "is too large")
            if not {"type", "previous_response_id", "input"}.issuperset(body):
                raise invalid(None, "a steer has 'previous_response_id' and 'input' alone")
            messages_of(Fields({"input": given}))
        except Refusal as e:
            await self._steer_failed(parent, given, "invalid_input", e.problem.message)
            return True
        if current is None or parent != current.id:
            known = parent in self._ended
            code = "response_already_completed" if known else "response_not_found"
            await self._steer_failed(parent, given, code, f"{str(parent)[:200]!r} is not under way on this socket")
        elif current.body.get("conversation") or current.body.get("store") is False:
            why = "a response of a conversation, or one that is not stored, cannot be steered"
            await self._steer_failed(parent, given, "steering_not_supported", why)
        elif len(current.steers) == MAX_WAITING:
            await self._steer_failed(parent, given, "too_many_pending_steers", f"{MAX_WAITING} steers wait already")
        else:
            steer = Steer(f"steer_{secrets.token_hex(16)}", current.id, cast("str | list[Any]", given))
            current.steers.append(steer)
            await self._tell("accepted", current.encoder, {"id": steer.id, "previous_response_id": current.id})
            self._gateway.runs.cancel_later(current.run, STEERED)
            changes = self._gateway.runs.changes
            await changes.note(await self._caller(), self._surface.name, "steer", run=current.run)
        return True

    async def _over(self, ended: OpenResponse) -> None:
        """A response has ended: what was said to it begins the next one, unless its calls wait for their results."""
        response = ended.encoder.response
        calls = [item for item in response["output"] if item["type"] in _STUBS]
        answered = {item["call_id"] for item in response["output"] if item["type"] in _STUBS.values()}
        owed = [_stub(call) for call in calls if call["call_id"] not in answered]
        self._ended[ended.id] = ended.steers if owed else []
        while len(self._ended) > MAX_PARENTS:
            del self._ended[next(iter(self._ended))]
        if response["status"] == "failed":
            for steer in ended.steers:
                why = "the response failed"
                await self._steer_failed(ended.id, steer.input, "successor_creation_failed", why, steer.id)
        elif owed:
            for steer in ended.steers:
                about = {"id": steer.id, "previous_response_id": ended.id}
                more = {"reason": "waiting_for_required_input", "required_input": owed}
                await self._tell("pending", ended.encoder, about, **more)
        if owed or response["status"] == "failed":
            ended.steers = []

    async def _steer_failed(
        self, parent: object, given: object, code: str, message: str, steer: str | None = None
    ) -> None:
        about = {"previous_response_id": parent, "input": given, **({"id": steer} if steer else {})}
        error = {"type": "invalid_request_error", "code": code, "message": message}
        await self._tell("failed", self._open and self._open.encoder, about, error=error)

    async def _tell(self, what: str, encoder: ResponseFrames | None, steer: Json, **more: object) -> None:
        # It takes no number from the response's events, by which a client may read on over HTTP.
        number = encoder.next_number if encoder else 0
        await self._send(_encode({"type": f"response.steer.{what}", "sequence_number": number, "steer": steer, **more}))

    # --------------------------------------------------------------------------------------------------------------

    def _body(self, frame: bytes) -> Json:
        """The request that a frame holds, with what was said to the response that it continues. Raises Refusal."""
        most = self._gateway.settings.body_bytes
        if len(frame) > most:
            why = f"the frame has more than {most} bytes"
            raise Refusal(Problem(status=413, code="request_too_large", message=why, kind="invalid_request"))
        body = json_body(frame)
        if body.pop("type", None) != "response.create":
            raise unsupported(
                "type", "frames of other types than 'response.create' and 'response.steer' are not supported"
            )
        if body.get("background"):
            raise invalid("background", "a response over a WebSocket cannot run in the background")
        given = body.get("input")
        if steers := self._ended.get(str(body.get("previous_response_id"))):
            own: list[Any] = (
                cast("list[Any]", given) if isinstance(given, list) else [{"role": "user", "content": given}]
            )
            body["input"] = [*(item for steer in steers for item in steer.items), *own]
        return {**body, "stream": True}

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


def _stub(call: Json) -> Json:
    """What the client owes for a call."""
    stub = {"type": _STUBS[call["type"]], "call_id": call["call_id"]}
    return {**stub, "name": call["name"]} if call["type"] == "function_call" else stub
