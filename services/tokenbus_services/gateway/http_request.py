"""Reads an HTTP request as far as every surface needs it: limits, headers, body, and an id for support."""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.requests import ClientDisconnect, Request

from tokenbus_services.gateway.problem import Problem, Refusal
from tokenbus_services.gateway.surfaces.contract import GatewayRequest

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
AsgiApp = Callable[[Scope, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]

REQUEST_ID = "request_id"
_ANSWER = "tokenbus.answer"
_GIVEN_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_ID_HEADERS = (b"x-request-id", b"request-id")
"""Clients of OpenAI read the first, those of Anthropic the second."""
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f]")


def headers_in(request: Request) -> dict[str, str]:
    """The headers with names in lower case. Of a repeated one the first counts. No value has control characters."""
    headers: dict[str, str] = {}
    for name, value in request.headers.items():
        headers.setdefault(name, _UNPRINTABLE.sub("", value))
    return headers


async def read_request(request: Request, *, most_bytes: int) -> GatewayRequest:
    """Read a request and its body. Raises Refusal (413, 415), and ClientDisconnect."""
    headers = headers_in(request)
    if headers.get("content-encoding", "identity") != "identity":
        why = "compressed request bodies are not supported: send the body as it is"
        raise Refusal(Problem(status=415, code="unsupported_encoding", message=why, kind="invalid_request"))
    declared = headers.get("content-length", "")
    if declared.isdigit() and int(declared) > most_bytes:
        raise _too_large(most_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most_bytes:
            raise _too_large(most_bytes)
    return GatewayRequest(
        body=bytes(body),
        headers=headers,
        path={name: str(value) for name, value in request.path_params.items()},
        query=dict(request.query_params),
    )


def _too_large(most: int) -> Refusal:
    why = f"the request's body has more than {most} bytes"
    return Refusal(Problem(status=413, code="request_too_large", message=why, kind="invalid_request"))


class WithRequestId:
    """ASGI middleware: each answer has an `x-request-id`, the client's own if it is harmless."""

    def __init__(self, app: AsgiApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        name: bytes = given if _GIVEN_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}".encode()
        scope.setdefault("state", {})[REQUEST_ID] = name.decode()

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *((each, name) for each in _ID_HEADERS)]
            await send(message)

        await self.app(scope, receive, with_id)


class AfterRouting:
    """ASGI middleware around the router: an endpoint's answer runs once routing has ended.

    A stream lives for minutes, and the router, its middlewares and its error handlers would keep a frame each for as
    long: 5 KB a stream. Endpoints return `AfterRouting.later(answer)`.
    """

    def __init__(self, app: AsgiApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)
        if answer := scope.pop(_ANSWER, None):
            await answer(scope, receive, send)

    @staticmethod
    def later(answer: AsgiApp) -> AsgiApp:
        """An app that leaves the answer for after routing."""

        async def app(scope: Scope, receive: Any, send: Any) -> None:
            scope[_ANSWER] = answer

        return app


__all__ = ["REQUEST_ID", "AfterRouting", "AsgiApp", "ClientDisconnect", "WithRequestId", "headers_in", "read_request"]
