"""The surface of AG-UI. Pure."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from tokenbus.events.public import PublicEvent, TerminalEvent
from tokenbus_services.gateway.problem import Problem
from tokenbus_services.gateway.surfaces.ag_ui.encoder import AgUiStream
from tokenbus_services.gateway.surfaces.ag_ui.history import Json
from tokenbus_services.gateway.surfaces.ag_ui.request import translate
from tokenbus_services.gateway.surfaces.contract import (
    Answer,
    Encoder,
    GatewayNote,
    GatewayRequest,
    Surface,
    Translated,
    TranslationRules,
    WholeAnswer,
)


class AgUiSurface(Surface):
    """Events of an AG-UI agent."""

    name: ClassVar[str] = "ag_ui"
    keep_alive: ClassVar[bytes] = b": keep-alive\n\n"

    def translate(self, request: GatewayRequest, rules: TranslationRules) -> Translated:
        """See `Surface.translate`."""
        return translate(request, rules)

    def encoder(self, request: GatewayRequest | None, note: GatewayNote, run: str) -> Encoder:
        """See `Surface.encoder`. ``request`` has the conversation that a snapshot repeats."""
        return self.joining(request, note, run, join_at=-1)

    def joining(self, request: GatewayRequest | None, note: GatewayNote, run: str, *, join_at: int) -> AgUiStream:
        """An encoder for a client that joins when the log ends with the seq ``join_at``."""
        return AgUiStream(
            run,
            thread=str(note.echo.get("thread", run)),
            client_run=str(note.echo.get("run", run)),
            given=_conversation(request),
            model=note.model,
            join_at=join_at,
        )

    def whole(self, note: GatewayNote, run: str) -> WholeAnswer:
        """See `Surface.whole`. Clients know the stream only, so it is sent at once."""
        return _WholeStream(self, note, run)

    def refusal(self, problem: Problem) -> Answer:
        """See `Surface.refusal`. The client hands status and body to `onRunFailed`."""
        error = {"message": problem.message, "code": problem.code, "param": problem.param, "run": problem.run}
        fields = {name: value for name, value in error.items() if value is not None}
        return Answer(status=problem.status, body=msgspec.json.encode({"error": fields}))


class _Input(msgspec.Struct):
    messages: list[Json] = []


def _conversation(request: GatewayRequest | None) -> list[Json]:
    if request is None:
        return []
    try:
        return msgspec.json.decode(request.body, type=_Input).messages
    except msgspec.DecodeError:  # a join without the first request at hand
        return []


class _WholeStream(WholeAnswer):
    def __init__(self, surface: AgUiSurface, note: GatewayNote, run: str) -> None:
        self._encoder = surface.encoder(None, note, run)
        self._out: list[bytes] = []

    def feed(self, event: PublicEvent) -> Answer | None:
        """See `WholeAnswer.feed`."""
        self._out += self._encoder.feed(event)
        if not isinstance(event, TerminalEvent):
            return None
        return Answer(status=200, body=b"".join(self._out), media_type=AgUiSurface.media_type)
