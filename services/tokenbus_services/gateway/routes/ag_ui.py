"""Routes of AG-UI: a run, the join of a client that lost it, and its cancel.

The protocol has neither of the last two. A thread is a session, so its runs follow each other. The client's `runId`
names what it said, so the same request twice is said once.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from tokenbus.errors import SessionNotFound
from tokenbus.events.public import PublicEvent
from tokenbus.events.sessions import session_run
from tokenbus_services.gateway import idempotency
from tokenbus_services.gateway.callers import Caller
from tokenbus_services.gateway.gateway import Gateway
from tokenbus_services.gateway.known_answers import KnownAnswer, KnownAnswers, session_named
from tokenbus_services.gateway.routes.session_routes import surface_routes
from tokenbus_services.gateway.runs import not_found
from tokenbus_services.gateway.session_answers import SessionAnswer
from tokenbus_services.gateway.session_door import Said
from tokenbus_services.gateway.surfaces.ag_ui import AgUiSurface
from tokenbus_services.gateway.surfaces.ag_ui.request import AgUiEcho
from tokenbus_services.gateway.surfaces.contract import Encoder, GatewayRequest


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
        self._answers = KnownAnswers("agui", server=gateway.runs.server, keys=gateway.runs.keys)

    async def post(self, request: Request) -> Any:
        gateway, surface = self._gateway, self.surface
        caller = await gateway.caller(request, surface)
        asked = await gateway.read(request)
        translated = surface.translate(asked, caller.rules)
        echo = msgspec.convert(translated.echo, AgUiEcho)
        session = session_named(echo.thread)
        said = await gateway.runs.say(
            *(caller, surface, asked, translated),
            session=session,
            append=idempotency.run_of(caller.tenant, echo.run, f"{surface.name} {echo.thread}"),
            when_busy=echo.when_busy,
            rewrites=await self._rewrites(caller, session, echo.answered),
        )
        try:
            answer = SessionAnswer(gateway, surface, caller, said)
            known = KnownAnswer(session=session, append=said.append, note=said.note, body=asked.body)
            await self._answers.put(caller.tenant, echo.run, known)
        except BaseException:
            gateway.runs.left(caller, said)
            raise
        return answer.streamed(lambda first: surface.encoder(asked, answer.note, first.run))

    async def join(self, request: Request) -> Any:
        gateway, surface = self._gateway, self.surface
        caller = await gateway.caller(request, surface)
        answer, body = await self._answer(request, caller)
        last = await gateway.runs.last_event(answer.run) if answer.run else None
        given, join_at = GatewayRequest(body=body, headers={}), last.seq if last else -1

        def encoder(first: PublicEvent) -> Encoder:
            return surface.joining(given, answer.note, first.run, join_at=join_at)

        return answer.streamed(encoder, early=False)

    async def cancel(self, request: Request) -> Response:
        caller = await self._gateway.caller(request, self.surface)
        answer, _ = await self._answer(request, caller)
        await answer.stop("cancelled by the client")
        return Response(status_code=204)

    async def _rewrites(self, caller: Caller, session: str, answered: str) -> bool:
        """Whether the client has another history than its thread, where no run is open: it has the last word on it."""
        try:
            info = await self._gateway.runs.sessions.info(caller, session)
        except SessionNotFound:
            return False
        if info.run or not info.runs:
            return False
        known = session_run(answered.partition(":")[0])
        return known is None or known.number != info.runs - 1

    async def _answer(self, request: Request, caller: Caller) -> tuple[SessionAnswer, bytes]:
        """The answer of the client's `runId`, and the request. Raises Refusal (404)."""
        name: str = request.path_params["run"]
        known = await self._answers.get(caller.tenant, name)
        if known is None:
            raise not_found(name)
        fate = await self._gateway.runs.sessions.fate(caller, known.session, known.append)
        if fate is None:
            raise not_found(name)
        said = Said(session=known.session, append=known.append, fate=fate, note=known.note)
        return SessionAnswer(self._gateway, self.surface, caller, said), known.body
