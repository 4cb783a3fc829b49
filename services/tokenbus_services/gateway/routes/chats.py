"""The chats of `useChat`: which run answers each of them, over HTTP and over a WebSocket."""

from __future__ import annotations

import contextlib

from tokenbus.errors import TokenbusError
from tokenbus_services.gateway.callers import Caller
from tokenbus_services.gateway.gateway import Gateway
from tokenbus_services.gateway.problem import Refusal
from tokenbus_services.gateway.routes.session_routes import publish_named
from tokenbus_services.gateway.runs import GatewayRun
from tokenbus_services.gateway.sessions import Sessions
from tokenbus_services.gateway.surfaces.ai_sdk_ui import AiSdkUiSurface
from tokenbus_services.gateway.surfaces.contract import GatewayNote, GatewayRequest, Translated

SUPERSEDED = "superseded"
STOPPED = "stopped"


class Chats:
    """The chats of one deployment, as every gateway sees them."""

    def __init__(self, gateway: Gateway) -> None:
        self.surface = AiSdkUiSurface()
        self.gateway = gateway
        self._sessions = Sessions("chat", server=gateway.runs.server, keys=gateway.runs.keys)

    async def begin(self, caller: Caller, asked: GatewayRequest) -> tuple[GatewayRun, Translated]:
        """Publish the answer to a chat, in the place of one that is still open. Raises Refusal, TokenbusError."""
        gateway, surface = self.gateway, self.surface
        translated = surface.translate(asked, caller.rules)
        chat = str(translated.echo["chat"])
        opened, earlier = await publish_named(
            gateway, surface, caller, asked, translated, sessions=self._sessions, name=chat
        )
        if earlier and earlier.run != opened.id:
            with contextlib.suppress(TokenbusError):  # it ends by itself
                await gateway.runs.cancel(earlier.run, SUPERSEDED)
        return opened, translated

    async def open_run(self, caller: Caller, chat: str) -> str | None:
        session = await self._sessions.get(caller.tenant, chat)
        return None if session is None or await self._sessions.has_ended(session.run) else session.run

    async def note(self, caller: Caller, run: str) -> GatewayNote | None:
        """The note of a chat's run; None if it cannot be read yet, or no longer."""
        try:
            return (await self.gateway.runs.owned(run, caller)).note
        except Refusal:  # it was not accepted yet, or its retention has passed
            return None
