"""The chats of `useChat`, which are sessions: what a request says to its chat, and the answer that it gets."""

from __future__ import annotations

import msgspec

from tokenbus.events.public import PublicEvent
from tokenbus_services.gateway.callers import Caller
from tokenbus_services.gateway.gateway import Gateway
from tokenbus_services.gateway.known_answers import KnownAnswer, KnownAnswers, session_named
from tokenbus_services.gateway.parked import Decisions, ParkedRuns
from tokenbus_services.gateway.session_answers import SessionAnswer, known_said
from tokenbus_services.gateway.surfaces.ai_sdk_ui import AiSdkUiSurface
from tokenbus_services.gateway.surfaces.ai_sdk_ui.request import UiEcho
from tokenbus_services.gateway.surfaces.contract import Encoder, GatewayRequest, Translated

STOPPED = "stopped"


class Chats:
    """The chats of one deployment, as every gateway sees them."""

    def __init__(self, gateway: Gateway) -> None:
        self.surface = AiSdkUiSurface()
        self.gateway = gateway
        self._answers = KnownAnswers("chat", server=gateway.runs.server, keys=gateway.runs.keys)
        self._parked = ParkedRuns(gateway.runs, "ai_sdk")

    async def begin(self, caller: Caller, asked: GatewayRequest) -> tuple[SessionAnswer, bool]:
        """Say what is new in a request; returns its answer, and whether that ends with its client.

        Raises Refusal, TokenbusError.
        """
        gateway, surface = self.gateway, self.surface
        translated = surface.translate(asked, caller.rules)
        echo = msgspec.convert(translated.echo, UiEcho)
        session, when_busy = session_named(echo.chat), echo.when_busy
        alone = translated.only_answers
        decided = await self._parked.find(caller, session, translated.given, open_only=not alone)
        if alone and decided:
            answer = await self._go_on(caller, translated, session, decided)
            return answer, translated.on_disconnect == "cancel"
        if decided and not echo.when_busy_given:
            when_busy = "steer"  # the run goes on with what was decided, and with the message
        said = await gateway.runs.say(
            *(caller, surface, asked, translated),
            session=session,
            append=None,
            when_busy=when_busy,
            rewrites=echo.rewrites,
        )
        try:
            answer = SessionAnswer(gateway, surface, caller, said)
            known = KnownAnswer(session=said.session, append=said.append, note=said.note)
            await self._answers.put(caller.tenant, echo.chat, known)
            if decided:  # after the message, which goes in before the run goes on
                await self._parked.send(caller, decided)
        except BaseException:
            gateway.runs.left(caller, said)
            raise
        return answer, translated.on_disconnect == "cancel"

    async def _go_on(self, caller: Caller, translated: Translated, session: str, decided: Decisions) -> SessionAnswer:
        """Decide what a run waits for; returns the rest of the run as an answer. Raises Refusal, ServerError."""
        refused = await self._parked.send(caller, decided)
        echo = msgspec.convert(translated.echo, UiEcho)
        known = KnownAnswer(
            session=session,
            append="",
            note=self.gateway.runs.note(self.surface, translated),
            run=decided.run,
            after=decided.after,
            decided=decided.waits,
            missed=refused is not None,
        )
        await self._answers.put(caller.tenant, echo.chat, known)
        if refused:
            raise refused
        said = known_said(known, None)
        assert said
        return SessionAnswer(self.gateway, self.surface, caller, said)

    async def open_answer(self, caller: Caller, chat: str) -> SessionAnswer | None:
        """The answer to what was said last in a chat; None if it is over."""
        known = await self._answers.get(caller.tenant, chat)
        if known is None:
            return None
        runs = self.gateway.runs
        if known.run:  # a client that resumes begins the message again
            known = msgspec.structs.replace(known, after=-1)
        fate = None if known.run else await runs.sessions.fate(caller, known.session, known.append)
        said = known_said(known, fate)
        if said is None or said.fate.state == "returned":
            return None
        if not known.missed and said.fate.run and await runs.has_ended(said.fate.run):
            return None
        answer = SessionAnswer(self.gateway, self.surface, caller, said)
        await answer.join()
        return answer

    def encoder(self, asked: GatewayRequest, answer: SessionAnswer, first: PublicEvent) -> Encoder:
        """The encoder of an answer. One that begins within a run is a message of its own."""
        note = answer.note
        if answer.turn and "message_id" not in note.echo:
            echo = {**note.echo, "message_id": f"{first.run}.{answer.turn}"}
            note = msgspec.structs.replace(note, echo=echo)
        return self.surface.joining(asked, note, first.run, after=answer.said.after)
