"""The chats of `useChat`, which are sessions: what a request says to its chat, and the answer that it gets."""

from __future__ import annotations

import msgspec

from tokenbus.events.public import PublicEvent
from tokenbus_services.gateway.callers import Caller
from tokenbus_services.gateway.gateway import Gateway
from tokenbus_services.gateway.known_answers import KnownAnswer, KnownAnswers, session_named
from tokenbus_services.gateway.session_answers import SessionAnswer
from tokenbus_services.gateway.session_door import Said
from tokenbus_services.gateway.surfaces.ai_sdk_ui import AiSdkUiSurface
from tokenbus_services.gateway.surfaces.ai_sdk_ui.request import UiEcho
from tokenbus_services.gateway.surfaces.contract import Encoder, GatewayRequest

STOPPED = "stopped"


class Chats:
    """The chats of one deployment, as every gateway sees them."""

    def __init__(self, gateway: Gateway) -> None:
        self.surface = AiSdkUiSurface()
        self.gateway = gateway
        self._answers = KnownAnswers("chat", server=gateway.runs.server, keys=gateway.runs.keys)

    async def begin(self, caller: Caller, asked: GatewayRequest) -> tuple[SessionAnswer, bool]:
        """Say what is new in a request; returns its answer, and whether that ends with its client.

        Raises Refusal, TokenbusError.
        """
        gateway, surface = self.gateway, self.surface
        translated = surface.translate(asked, caller.rules)
        echo = msgspec.convert(translated.echo, UiEcho)
        said = await gateway.runs.say(
            *(caller, surface, asked, translated),
            session=session_named(echo.chat),
            append=None,
            when_busy=echo.when_busy,
            rewrites=echo.rewrites,
        )
        try:
            answer = SessionAnswer(gateway, surface, caller, said)
            known = KnownAnswer(session=said.session, append=said.append, note=said.note)
            await self._answers.put(caller.tenant, echo.chat, known)
        except BaseException:
            gateway.runs.left(caller, said)
            raise
        return answer, translated.on_disconnect == "cancel"

    async def open_answer(self, caller: Caller, chat: str) -> SessionAnswer | None:
        """The answer to what was said last in a chat; None if it is over."""
        known = await self._answers.get(caller.tenant, chat)
        if known is None:
            return None
        runs = self.gateway.runs
        fate = await runs.sessions.fate(caller, known.session, known.append)
        if fate is None or fate.state == "returned" or (fate.run and await runs.has_ended(fate.run)):
            return None
        said = Said(session=known.session, append=known.append, fate=fate, note=known.note)
        return SessionAnswer(self.gateway, self.surface, caller, said)

    def encoder(self, asked: GatewayRequest, answer: SessionAnswer, first: PublicEvent) -> Encoder:
        """The encoder of an answer. One that begins within a run is a message of its own."""
        note = answer.note
        if answer.turn and "message_id" not in note.echo:
            echo = {**note.echo, "message_id": f"{first.run}.{answer.turn}"}
            note = msgspec.structs.replace(note, echo=echo)
        return self.surface.encoder(asked, note, first.run)
