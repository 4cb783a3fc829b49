"""Routes of `useChat`: a chat's request, its resume after a reload, and its stop.

A chat has one open run. A second request for the same chat wins: the earlier run is cancelled, because its client has
stopped listening, and `stop()` of the AI SDK tells the server nothing.
"""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from tokenbus.errors import TokenbusError
from tokenbus_services.gateway.callers import Caller
from tokenbus_services.gateway.gateway import Gateway
from tokenbus_services.gateway.http_request import headers_in, read_request
from tokenbus_services.gateway.problem import Refusal
from tokenbus_services.gateway.routes.session_routes import publish_named, rejoined, surface_routes
from tokenbus_services.gateway.sessions import Sessions
from tokenbus_services.gateway.surfaces.ai_sdk_ui import AiSdkUi
from tokenbus_services.gateway.surfaces.contract import GatewayNote, GatewayRequest

SUPERSEDED = "superseded"
STOPPED = "stopped"


def routes(gateway: Gateway) -> list[BaseRoute]:
    """The routes of this surface."""
    chats = _Chats(gateway)
    served = (
        ("/api/chat", chats.post, "POST"),
        ("/api/chat/{chat:path}/stream", chats.resume, "GET"),
        ("/api/chat/{chat:path}/stop", chats.stop, "POST"),
    )
    return surface_routes(gateway, chats.surface, served)


class _Chats:
    def __init__(self, gateway: Gateway) -> None:
        self.surface = AiSdkUi()
        self._gateway = gateway
        self._sessions = Sessions("chat", server=gateway.runs.server, keys=gateway.runs.keys)

    async def post(self, request: Request) -> Any:
        gateway, surface = self._gateway, self.surface
        caller = await gateway.caller(request, surface)
        asked = await read_request(request, most_bytes=gateway.settings.body_bytes)
        translated = gateway.translated(caller, surface, asked)
        chat = str(translated.echo["chat"])
        opened, earlier = await publish_named(
            gateway, surface, caller, asked, translated, sessions=self._sessions, name=chat
        )
        if earlier and earlier.run != opened.id:
            with contextlib.suppress(TokenbusError):  # it ends by itself
                await gateway.runs.cancel(earlier.run, SUPERSEDED)
        return gateway.answer(opened, surface, asked, translated)

    async def resume(self, request: Request) -> Any:
        gateway, surface = self._gateway, self.surface
        caller = await gateway.caller(request, surface)
        run = await self._open_run(request, caller)
        note = await self._note(run, caller) if run else None
        if run is None or note is None:
            return Response(status_code=204)
        asked = GatewayRequest(body=b"", headers=headers_in(request), query=dict(request.query_params))
        return rejoined(gateway, surface, run, lambda first: surface.encoder(asked, note, run))

    async def stop(self, request: Request) -> Response:
        caller = await self._gateway.caller(request, self.surface)
        run = await self._open_run(request, caller)
        if run is not None:
            await self._gateway.runs.cancel(run, STOPPED)
        return Response(msgspec.json.encode({"stopped": run is not None}), media_type="application/json")

    async def _open_run(self, request: Request, caller: Caller) -> str | None:
        """The chat's open run."""
        session = await self._sessions.get(caller.tenant, request.path_params["chat"])
        return None if session is None or await self._sessions.has_ended(session.run) else session.run

    async def _note(self, run: str, caller: Caller) -> GatewayNote | None:
        try:
            return await self._gateway.runs.owned(run, caller)
        except Refusal:  # it was not accepted yet, or its retention has passed
            return None
