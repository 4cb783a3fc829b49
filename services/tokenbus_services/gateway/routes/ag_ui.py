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
from tokenbus_services.gateway.answers.answer import StreamedAnswer
from tokenbus_services.gateway.callers import Caller
from tokenbus_services.gateway.gateway import Gateway
from tokenbus_services.gateway.known_answers import KnownAnswer, KnownAnswers, session_named
from tokenbus_services.gateway.parked import Decisions, ParkedRuns
from tokenbus_services.gateway.problem import Problem, Refusal
from tokenbus_services.gateway.routes.session_routes import surface_routes
from tokenbus_services.gateway.runs import not_found
from tokenbus_services.gateway.session_answers import SessionAnswer, known_said
from tokenbus_services.gateway.surfaces.ag_ui import AgUiSurface
from tokenbus_services.gateway.surfaces.ag_ui.request import AgUiEcho
from tokenbus_services.gateway.surfaces.contract import Encoder, GatewayRequest, Translated


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
        self._parked = ParkedRuns(gateway.runs, "ag_ui")
        self._answers = KnownAnswers("agui", server=gateway.runs.server, keys=gateway.runs.keys)

    async def post(self, request: Request) -> Any:
        gateway, surface = self._gateway, self.surface
        caller = await gateway.caller(request, surface)
        asked = await gateway.read(request)
        translated = surface.translate(asked, caller.rules)
        echo = msgspec.convert(translated.echo, AgUiEcho)
        session, when_busy = session_named(echo.thread), echo.when_busy
        alone = translated.only_answers
        decided = await self._parked.find(caller, session, translated.given, open_only=not alone)
        if alone and decided:
            return await self._go_on(caller, asked, translated, decided)
        info = await self._info(caller, session)
        if not echo.when_busy_given and info and info.run:
            open_now = await gateway.runs.waits.of_run(info.run)
            if decided:
                when_busy = "steer"  # the run goes on with what was decided, and with the message
            elif any(each.what != "tool_result" for each in open_now):
                why = "the thread has an interrupt that `resume` does not answer"
                raise Refusal(Problem(status=409, code="interrupts_open", message=why, kind="invalid_request"))
        said = await gateway.runs.say(
            *(caller, surface, asked, translated),
            session=session,
            append=idempotency.run_of(caller.tenant, echo.run, f"{surface.name} {echo.thread}"),
            when_busy=when_busy,
            rewrites=_rewrites(info, echo.answered),
        )
        try:
            answer = SessionAnswer(gateway, surface, caller, said)
            known = KnownAnswer(session=session, append=said.append, note=said.note, body=asked.body)
            await self._answers.put(caller.tenant, echo.run, known)
            if decided:  # after the message, which goes in before the run goes on
                await self._parked.send(caller, decided)
        except BaseException:
            gateway.runs.left(caller, said)
            raise
        return answer.streamed(lambda first: surface.encoder(asked, answer.note, first.run))

    async def _go_on(
        self, caller: Caller, asked: GatewayRequest, translated: Translated, decided: Decisions
    ) -> StreamedAnswer:
        """Decide what a run waits for, and answer with the rest of it. Raises Refusal, ServerError."""
        refused = await self._parked.send(caller, decided)
        echo = msgspec.convert(translated.echo, AgUiEcho)
        known = KnownAnswer(
            session=session_named(echo.thread),
            append="",
            note=self._gateway.runs.note(self.surface, translated),
            run=decided.run,
            after=decided.after,
            decided=decided.waits,
            body=asked.body,
        )
        await self._answers.put(caller.tenant, echo.run, known)
        if refused:
            raise refused
        said = known_said(known, None)
        assert said
        answer = SessionAnswer(self._gateway, self.surface, caller, said)
        return answer.streamed(lambda first: self.surface.joining(asked, answer.note, first.run, after=decided.after))

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
        known = await self._answers.get(caller.tenant, name)
        if known is None:
            raise not_found(name)
        if known.run:  # a client that joins gets all of it
            known = msgspec.structs.replace(known, after=-1)
        fate = None if known.run else await self._gateway.runs.sessions.fate(caller, known.session, known.append)
        said = known_said(known, fate)
        if said is None:
            raise not_found(name)
        return SessionAnswer(self._gateway, self.surface, caller, said), known.body


def _rewrites(info: SessionInfo | None, answered: str) -> bool:
    """Whether the client has another history than its thread, where no run is open: it has the last word on it."""
    if info is None or info.run or not info.runs:
        return False
    known = session_run(answered.partition(":")[0])
    return known is None or known.number != info.runs - 1
