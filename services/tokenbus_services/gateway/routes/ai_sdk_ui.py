"""Routes of `useChat`: a chat's request, its resume after a reload, its stop, and the WebSocket of all three.

A chat has one open run. A second request for the same chat wins: the earlier run is cancelled, because its client has
stopped listening, and over HTTP `stop()` of the AI SDK sends the server nothing.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, WebSocketRoute
from starlette.websockets import WebSocket

from tokenbus_services.gateway.gateway import Gateway
from tokenbus_services.gateway.http_request import headers_in
from tokenbus_services.gateway.routes.chats import STOPPED, Chats
from tokenbus_services.gateway.routes.session_routes import rejoined, surface_routes
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
        gateway, surface = self._gateway, self.chats.surface
        caller = await gateway.caller(request, surface)
        asked = await gateway.read(request)
        opened, translated = await self.chats.begin(caller, asked)
        return gateway.answer(opened, surface, asked, translated)

    async def resume(self, request: Request) -> Any:
        gateway, surface = self._gateway, self.chats.surface
        caller = await gateway.caller(request, surface)
        run = await self.chats.open_run(caller, request.path_params["chat"])
        note = await self.chats.note(caller, run) if run else None
        if run is None or note is None:
            return Response(status_code=204)
        asked = GatewayRequest(body=b"", headers=headers_in(request), query=dict(request.query_params))
        return rejoined(gateway, surface, run, lambda first: surface.encoder(asked, note, run))

    async def stop(self, request: Request) -> Response:
        caller = await self._gateway.caller(request, self.chats.surface)
        run = await self.chats.open_run(caller, request.path_params["chat"])
        if run is not None:
            await self._gateway.runs.cancel(run, STOPPED)
        return Response(msgspec.json.encode({"stopped": run is not None}), media_type="application/json")

    async def socket(self, websocket: WebSocket) -> None:
        """Serve a connection of `WebSocketChatTransport`."""
        await ChatSocket(self.chats, websocket).serve()
