"""Reads an HTTP request as far as every surface needs it, and answers what no route has answered."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from typing import Any

import msgspec
import structlog
from starlette.requests import Request
from starlette.responses import Response

from tokenbus_services.gateway.answers import asgi
from tokenbus_services.gateway.problem import Problem, Refusal, defect, invalid, overloaded, restarting
from tokenbus_services.gateway.surfaces.contract import Answer, GatewayRequest
from tokenbus_services.net.web_socket import OWNER, UNKNOWN, FairShare

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
AsgiApp = Callable[[Scope, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]
Refuse = Callable[[Problem], Answer]
"""Writes a problem in a surface's own form."""

REQUEST_ID = "request_id"
_BODY_BYTES = "tokenbus.body_bytes"
_ANSWER = "tokenbus.answer"
_GIVEN_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_ID_HEADERS = (b"x-request-id", b"request-id")
"""Clients of OpenAI read the first, those of Anthropic the second."""
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_LAST_WORDS_S = 1.0


def headers_of(values: Mapping[str, str]) -> dict[str, str]:
    """Headers with names in lower case. Of a repeated one the first counts.

    Raises Refusal for control characters: a key that is not what it looks like must not open anything.
    """
    headers: dict[str, str] = {}
    for name, value in values.items():
        if _UNPRINTABLE.search(value):
            raise invalid(name.lower()[:100], "a header may not have control characters")
        headers.setdefault(name.lower(), value)
    return headers


def headers_in(request: Request) -> dict[str, str]:
    return headers_of(request.headers)


async def read_request(request: Request, *, most_bytes: int, room: FairShare | None = None) -> GatewayRequest:
    """Read a request and its body. Raises Refusal (413, 415, 429, 503), and ClientDisconnect.

    ``room``: the bytes of bodies that all requests may hold. They are held until `release_body`.
    """
    headers = headers_in(request)
    size = declared_size(headers, most_bytes=most_bytes)
    hold_bytes(request, size, room)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most_bytes:
            raise too_large(most_bytes)
        if len(body) > size:
            hold_bytes(request, len(body) - size, room)
            size = len(body)
    return GatewayRequest(
        body=bytes(body),
        headers=headers,
        path={name: str(value) for name, value in request.path_params.items()},
        query=dict(request.query_params),
    )


def declared_size(headers: Mapping[str, str], *, most_bytes: int) -> int:
    """The length that a request says its body has; 0 if it says none. Raises Refusal (413, 415)."""
    if headers.get("content-encoding", "identity") != "identity":
        why = "compressed request bodies are not supported: send the body as it is"
        raise Refusal(Problem(status=415, code="unsupported_encoding", message=why, kind="invalid_request"))
    declared = headers.get("content-length", "")
    size = int(declared) if declared.isdigit() and len(declared) < 20 else 0
    if size > most_bytes or len(declared) >= 20:
        raise too_large(most_bytes)
    return size


def owner_of(scope: Scope) -> str | None:
    """Whose share of the gateway's resources a request uses."""
    return scope["state"].get(OWNER, UNKNOWN)


def release_body(scope: Scope, room: FairShare) -> None:
    """Give back what the request's body holds."""
    for owner, size in scope.pop(_BODY_BYTES, ()):
        room.give_back(owner, size)


def hold_bytes(request: Request, size: int, room: FairShare | None) -> None:
    """Count bytes of a request's body, or of a large answer, among those that are held, until `release_body`. Raises
    Refusal (429, 503).
    """
    if room is None or not size:
        return
    owner = owner_of(request.scope)
    if not room.take(owner, size):
        raise overloaded("too_many_bytes", "hold too many bytes of bodies", of_key=bool(owner))
    request.scope.setdefault(_BODY_BYTES, []).append((owner, size))


def too_large(most: int) -> Refusal:
    """The refusal of a body with more bytes."""
    why = f"the request's body has more than {most} bytes"
    return Refusal(Problem(status=413, code="request_too_large", message=why, kind="invalid_request"))


def response_to(problem: Problem, refusal: Refuse, scope: Scope | None = None) -> Response:
    """A problem as an HTTP answer, in the shape of ``refusal``. ``scope``: of the request that it answers."""
    if scope is not None:
        problem = with_request(problem, scope)
    answer = refusal(problem)
    headers = {**asgi.headers_of(problem), "x-content-type-options": "nosniff", **answer.headers}
    if problem.run:
        headers["x-tokenbus-run"] = problem.run
    return Response(answer.body, answer.status, headers, media_type=answer.media_type)


class Edge:
    """ASGI middleware, the outermost one: every answer has one `x-request-id`, and every request an answer.

    The id is the client's own if it is harmless. A request that nothing has answered, because of a defect or because
    the server stops, is refused in the form that ``form`` returns for its scope.
    """

    def __init__(self, app: AsgiApp, *, form: Callable[[Scope], Refuse]) -> None:
        self.app = app
        self._form = form

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        name: bytes = given if _GIVEN_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}".encode()
        scope.setdefault("state", {})[REQUEST_ID] = name.decode()
        answer = _SocketAnswer(send) if scope["type"] == "websocket" else _HttpAnswer(send, name)
        try:
            await self.app(scope, receive, answer.send)
        except asyncio.CancelledError:  # the server stops, and waits for nothing but this task
            problem = restarting()
        except OSError:  # the client has disconnected
            return
        except Exception:
            if answer.complete:  # Starlette raises again what its handler has answered
                return
            log.exception("request_failed", request=name.decode())
            problem = defect()
        else:
            problem = (
                None
                if answer.begun
                else Problem(status=404, code="not_found", message="nothing is served here", kind="not_found")
            )
        if problem is None:
            return
        if answer.begun:
            await answer.cut()
            return
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await answer.refuse(response_to(problem, self._form(scope), scope), scope, receive)


class _HttpAnswer:
    """Knows how far the answer to a request has come."""

    def __init__(self, send: Any, name: bytes) -> None:
        self._send = send
        self._name = name
        self.begun = False
        self.complete = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kept = [pair for pair in message.get("headers", ()) if pair[0].lower() not in _ID_HEADERS]
            message = {**message, "headers": [*kept, *((each, self._name) for each in _ID_HEADERS)]}
            self.begun = True
        elif message["type"] == "http.response.body" and not message.get("more_body"):
            self.complete = True
        await self._send(message)

    async def refuse(self, response: Response, scope: Scope, receive: Any) -> None:
        await response(scope, receive, self.send)

    async def cut(self) -> None:
        """Nothing more is sent: uvicorn closes the connection of an answer that is not complete."""


class _SocketAnswer:
    """The same, for the handshake of a WebSocket."""

    def __init__(self, send: Any) -> None:
        self._send = send
        self.begun = False
        self.complete = False

    async def send(self, message: Message) -> None:
        if message["type"] == "websocket.close" and not self.begun:
            return  # no route: `Edge` says so with a status and a body
        self.begun = True
        await self._send(message)

    async def refuse(self, response: Response, scope: Scope, receive: Any) -> None:
        headers = [(name, value) for name, value in response.raw_headers]
        start = {"type": "websocket.http.response.start", "status": response.status_code, "headers": headers}
        await self._send(start)
        await self._send({"type": "websocket.http.response.body", "body": bytes(response.body)})

    async def cut(self) -> None:
        with suppress(RuntimeError, OSError):
            await self._send({"type": "websocket.close", "code": 1011})


def with_request(problem: Problem, scope: Scope) -> Problem:
    return msgspec.structs.replace(problem, request=scope.get("state", {}).get(REQUEST_ID))


class AfterRouting:
    """ASGI middleware around the router: an endpoint's answer runs once routing has ended.

    A stream lives for minutes, and the router, its middlewares and its error handlers would keep a frame each for as
    long: 5 KB a stream. Endpoints leave their answer with `AfterRouting.later`.
    """

    def __init__(self, app: AsgiApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)
        if answer := scope.pop(_ANSWER, None):
            await answer(scope, receive, send)

    @staticmethod
    def later(scope: Scope, answer: AsgiApp) -> None:
        """Leave the answer to this request for after routing."""
        scope[_ANSWER] = answer
