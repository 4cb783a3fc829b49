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
from tokenbus.events.sessions import SessionInfo, session_run
from tokenbus_services.gateway import idempotency
from tokenbus_services.gateway.callers import Caller
from tokenbus_services.gateway.gateway import Gateway
from tokenbus_services.gateway.known_answers import session_named
from tokenbus_services.gateway.problem import Problem, Refusal
from tokenbus_services.gateway.routes.routing import surface_routes
from tokenbus_services.gateway.runs import not_found
from tokenbus_services.gateway.session_answers import Conversations, SessionAnswer, Told
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
        self._threads = Conversations(gateway, self.surface, kind="agui", door="ag_ui", keeps_body=True)

    async def post(self, request: Request) -> Any:
        gateway, surface, threads = self._gateway, self.surface, self._threads
        caller = await gateway.caller(request, surface)
        asked = await gateway.read(request)
        translated = surface.translate(asked, caller.rules)
        echo = msgspec.convert(translated.echo, AgUiEcho)
        when_busy = echo.when_busy
        told = Told(caller, asked, translated, session_named(echo.thread), echo.run)
        decided = await threads.decided(told)
        if translated.only_answers and decided:
            answer = await threads.go_on(told, decided)
        else:
            info = await self._info(caller, told.session)
            if not echo.when_busy_given and info and info.run:
                open_now = await gateway.runs.waits.of_run(info.run)
                if decided:
                    when_busy = "steer"  # the run goes on with what was decided, and with the message
                elif any(each.what != "tool_result" for each in open_now):
                    why = "the thread has an interrupt that `resume` does not answer"
                    raise Refusal(Problem(status=409, code="interrupts_open", message=why, kind="invalid_request"))
            append = idempotency.run_of(caller.tenant, echo.run, f"{surface.name} {echo.thread}")
            rewrites = _rewrites(info, echo.answered)
            answer = await threads.say(told, decided, append=append, when_busy=when_busy, rewrites=rewrites)
        after = answer.said.after
        return answer.streamed(lambda first: surface.joining(asked, answer.note, first.run, after=after))

    async def join(self, request: Request) -> Any:
        gateway, surface = self._gateway, self.surface
        caller = await gateway.caller(request, surface)
        answer, body = await self._answer(request, caller)
        last = await answer.join()
        given, join_at = GatewayRequest(body=body, headers={}), last.seq if last else -1

        def encoder(first: PublicEvent) -> Encoder:
            return surface.joining(given, answer.note, first.run, join_at=join_at)

        return answer.streamed(encoder, early=False)

    async def cancel(self, request: Request) -> Response:
        caller = await self._gateway.caller(request, self.surface)
        answer, _ = await self._answer(request, caller)
        await answer.stop("cancelled by the client")
        return Response(status_code=204)

    async def _info(self, caller: Caller, session: str) -> SessionInfo | None:
        try:
            return await self._gateway.runs.sessions.info(caller, session)
        except SessionNotFound:
            return None

    async def _answer(self, request: Request, caller: Caller) -> tuple[SessionAnswer, bytes]:
        """The answer of the client's `runId`, and the request. Raises Refusal (404)."""
        name: str = request.path_params["run"]
        found = await self._threads.find(caller, name)
        if found is None:
            raise not_found(name)
        known, said = found
        return SessionAnswer(self._gateway, self.surface, caller, said), known.body


def _rewrites(info: SessionInfo | None, answered: str) -> bool:
    """Whether the client has another history than its thread, where no run is open: it has the last word on it."""
    if info is None or info.run or not info.runs:
        return False
    known = session_run(answered.partition(":")[0])
    return known is None or known.number != info.runs - 1
