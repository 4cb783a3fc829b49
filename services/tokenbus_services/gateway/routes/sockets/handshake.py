"""What WebSockets of every protocol share: the headers of the handshake, its checks, and a refusal in its place."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect

from tokenbus_services.gateway import idempotency
from tokenbus_services.gateway.http_request import headers_of
from tokenbus_services.gateway.problem import Problem, Refusal

GONE = 1006
"""Code of a connection that ended without a close frame."""
MISUSED = 1008
"""Close code for a client that breaks the rules."""


def handshake_headers(websocket: WebSocket) -> dict[str, str]:
    """The headers of the handshake. An `Idempotency-Key` would make all requests of the socket the same run.

    Raises Refusal.
    """
    headers = headers_of(websocket.headers)
    headers.pop(idempotency.HEADER, None)
    return headers


def check_origin(headers: Mapping[str, str], origins: Collection[str]) -> None:
    """Only pages that the operator listed may connect: browsers put no limit on WebSockets to other sites.

    Raises Refusal (403).
    """
    origin = headers.get("origin")
    if origin is not None and origin.lower() not in {each.lower() for each in origins}:
        why = "pages of this origin may not connect: the setting gateway.origins lists those that may"
        raise Refusal(Problem(status=403, code="origin_not_allowed", message=why, kind="auth"))


async def deny(websocket: WebSocket, response: Response) -> None:
    """Refuse the connection with an HTTP status, if the server can."""
    if "websocket.http.response" in websocket.scope.get("extensions", {}):
        await websocket.send_denial_response(response)
    else:
        await websocket.close(MISUSED)


async def send_text(websocket: WebSocket, data: bytes) -> None:
    """Send a frame. Raises WebSocketDisconnect if the client has gone, and no RuntimeError, which would be a defect."""
    text = data.decode()
    try:
        await websocket.send_text(text)
    except RuntimeError as e:  # Starlette and uvicorn, once the socket is closed
        raise WebSocketDisconnect(GONE) from e
