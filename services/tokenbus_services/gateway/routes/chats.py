"""The chats of `useChat`, which are sessions: what a request says to its chat, and the answer that it gets."""

from __future__ import annotations

import msgspec

from tokenbus.events.public import PublicEvent
from tokenbus_services.gateway.callers import Caller
from tokenbus_services.gateway.gateway import Gateway
from tokenbus_services.gateway.known_answers import session_named
from tokenbus_services.gateway.session_answers import Conversations, SessionAnswer, Told
from tokenbus_services.gateway.surfaces.ai_sdk_ui import AiSdkUiSurface
from tokenbus_services.gateway.surfaces.ai_sdk_ui.request import UiEcho
from tokenbus_services.gateway.surfaces.contract import Encoder, GatewayRequest

STOPPED = "stopped"


class Chats(Conversations):
    """The chats of one deployment, as every gateway sees them."""

    def __init__(self, gateway: Gateway) -> None:
        self.surface = AiSdkUiSurface()
        super().__init__(gateway, self.surface, kind="chat", door="ai_sdk")

    async def begin(self, caller: Caller, asked: GatewayRequest) -> tuple[SessionAnswer, bool]:
        """Say what is new in a request; returns its answer, and whether that ends with its client.

        Raises Refusal, TokenbusError.
        """
        translated = self.surface.translate(asked, caller.rules)
        echo = msgspec.convert(translated.echo, UiEcho)
        when_busy = echo.when_busy
        told = Told(caller, asked, translated, session_named(echo.chat), echo.chat)
        decided = await self.decided(told)
        if translated.only_answers and decided:
            answer = await self.go_on(told, decided)
        else:
            if decided and not echo.when_busy_given:
                when_busy = "steer"  # the run goes on with what was decided, and with the message
            answer = await self.say(told, decided, append=None, when_busy=when_busy, rewrites=echo.rewrites)
        return answer, translated.on_disconnect == "cancel"

    async def open_answer(self, caller: Caller, chat: str) -> SessionAnswer | None:
        """The answer to what was said last in a chat; None if it is over. A client that resumes begins the message
        again.
        """
        if (found := await self.find(caller, chat)) is None:
            return None
        known, said = found
        if said.fate.state == "returned":
            return None
        if not known.missed and said.fate.run and await self.gateway.runs.has_ended(said.fate.run):
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
