"""Routes of AG-UI: a run, the join of a client that lost it, and its cancel.

The protocol has neither of the last two. The client's `runId` names the run, so the same request twice is one run.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from tokenbus_services.gateway import idempotency
from tokenbus_services.gateway.callers import Caller
from tokenbus_services.gateway.gateway import Gateway
from tokenbus_services.gateway.routes.session_routes import publish_named, rejoined, surface_routes
from tokenbus_services.gateway.runs import not_found
from tokenbus_services.gateway.sessions import Session, Sessions
from tokenbus_services.gateway.surfaces.ag_ui import AgUiSurface
from tokenbus_services.gateway.surfaces.contract import GatewayNote, GatewayRequest


def routes(gateway: Gateway) -> list[BaseRoute]:
    agent = _Agent(gateway)
    served = (
        ("/agui", agent.post, "POST"),
        ("/agui/runs/{run:path}", agent.join, "GET"),
        ("/agui/runs/{run:path}", agent.cancel, "DELETE"),
    )
    return surface_routes(gateway, agent.surface, served)


class _Agent:
    def __init__(self, gateway: Gateway) -> None:
        self.surface = AgUiSurface()
        self._gateway = gateway
        self._sessions = Sessions("agui", server=gateway.runs.server, keys=gateway.runs.keys)

    async def post(self, request: Request) -> Any:
        gateway, surface = self._gateway, self.surface
        caller = await gateway.caller(request, surface)
        asked = await gateway.read(request)
        translated = surface.translate(asked, caller.rules)
        name = str(translated.echo["run"])
        headers = {idempotency.HEADER: name, **asked.headers}
        asked = msgspec.structs.replace(asked, headers=headers)
        opened, _ = await publish_named(
            gateway, surface, caller, asked, translated, sessions=self._sessions, name=name, body=asked.body
        )
        return gateway.answer(opened, surface, asked, translated)

    async def join(self, request: Request) -> Any:
        gateway, surface = self._gateway, self.surface
        caller = await gateway.caller(request, surface)
        session, note = await self._session(request, caller)
        join_at = await self._sessions.last_seq(session.run)
        given = GatewayRequest(body=session.body, headers={})
        return rejoined(
            gateway, surface, session.run, lambda first: surface.joining(given, note, session.run, join_at=join_at)
        )

    async def cancel(self, request: Request) -> Response:
        caller = await self._gateway.caller(request, self.surface)
        session, _ = await self._session(request, caller)
        await self._gateway.runs.cancel(session.run, "cancelled by the client")
        return Response(status_code=204)

    async def _session(self, request: Request, caller: Caller) -> tuple[Session, GatewayNote]:
        """The run of the client's `runId`. Raises Refusal (404)."""
        name: str = request.path_params["run"]
        session = await self._sessions.get(caller.tenant, name)
        if session is None:
            raise not_found(name)
        note = (await self._gateway.runs.owned(session.run, caller)).note
        if note is None:
            raise not_found(name)
        return session, note
