"""Routes of `useChat`: a chat's request, its resume after a reload, its stop, and the WebSocket of all three.

A chat is a session, so it has one open run. By default a second request for the same chat interrupts that run, because
its client has stopped listening, and over HTTP `stop()` of the AI SDK sends the server nothing. `whenBusy` of the body
says otherwise.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, WebSocketRoute
from starlette.websockets import WebSocket

from tokenbus_services.gateway.gateway import Gateway
from tokenbus_services.gateway.http_request import headers_in
from tokenbus_services.gateway.routes.chats import STOPPED, Chats
from tokenbus_services.gateway.routes.routing import surface_routes
from tokenbus_services.gateway.routes.sockets.chat_socket import ChatSocket
from tokenbus_services.gateway.surfaces.contract import GatewayRequest

PATH = "/api/chat"


def routes(gateway: Gateway) -> list[BaseRoute]:
    api = _ChatApi(Chats(gateway))
    served = (
        (PATH, api.post, "POST"),
        (PATH + "/{chat:path}/stream", api.resume, "GET"),
        (PATH + "/{chat:path}/stop", api.stop, "POST"),
    )
    return [*surface_routes(gateway, api.chats.surface, served), WebSocketRoute(PATH, api.socket)]


class _ChatApi:
    def __init__(self, chats: Chats) -> None:
        self.chats = chats
        self._gateway = chats.gateway

    async def post(self, request: Request) -> Any:
        caller = await self._gateway.caller(request, self.chats.surface)
        asked = await self._gateway.read(request)
        answer, cancels = await self.chats.begin(caller, asked)
        return answer.streamed(partial(self.chats.encoder, asked, answer), cancels=cancels)

    async def resume(self, request: Request) -> Any:
        caller = await self._gateway.caller(request, self.chats.surface)
        answer = await self.chats.open_answer(caller, request.path_params["chat"])
        if answer is None:
            return Response(status_code=204)
        asked = GatewayRequest(body=b"", headers=headers_in(request), query=dict(request.query_params))
        return answer.streamed(partial(self.chats.encoder, asked, answer), early=False)

    async def stop(self, request: Request) -> Response:
        caller = await self._gateway.caller(request, self.chats.surface)
        answer = await self.chats.open_answer(caller, request.path_params["chat"])
        stopped = answer is not None and await answer.stop(STOPPED)
        return Response(msgspec.json.encode({"stopped": stopped}), media_type="application/json")

    async def socket(self, websocket: WebSocket) -> None:
        """Serve a connection of `WebSocketChatTransport`."""
        await ChatSocket(self.chats, websocket).serve()
