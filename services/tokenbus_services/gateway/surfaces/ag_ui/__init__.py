"""AG-UI (protocol 1.0): a run as the events of an agent, and how a client joins it again. Pure."""

from __future__ import annotations

import msgspec

from tokenbus.events.waits import WaitKind
from tokenbus_services.gateway.problem import Problem
from tokenbus_services.gateway.surfaces.ag_ui.encoder import AgUiStream
from tokenbus_services.gateway.surfaces.ag_ui.history import Json
from tokenbus_services.gateway.surfaces.ag_ui.request import AgUiEcho, read
from tokenbus_services.gateway.surfaces.contract import Answer, Encoder, GatewayNote, GatewayRequest
from tokenbus_services.gateway.surfaces.surface import Surface

__all__ = ["AgUiSurface"]


class AgUiSurface(Surface):
    """Events of an AG-UI agent."""

    name = "ag_ui"
    keep_alive = b": keep-alive\n\n"
    read = staticmethod(read)

    def encoder(self, request: GatewayRequest | None, note: GatewayNote, run: str) -> Encoder:
        """See `Surface.encoder`. ``request`` has the conversation that a snapshot repeats."""
        return self.joining(request, note, run)

    def waits_for(self, note: GatewayNote) -> frozenset[WaitKind]:
        """See `Surface.waits_for`."""
        return frozenset({"approval", "answer", "tool_result"})

    def joining(
        self, request: GatewayRequest | None, note: GatewayNote, run: str, *, join_at: int = -1, after: int = -1
    ) -> AgUiStream:
        """An encoder for a client that joins when the log ends with the seq ``join_at``, or that has the run up to the
        seq ``after``.
        """
        echo = msgspec.convert(note.echo, AgUiEcho)
        return AgUiStream(
            run,
            thread=echo.thread or run,
            client_run=echo.run or run,
            given=_conversation(request),
            model=note.model,
            join_at=join_at,
            after=after,
        )

    @staticmethod
    def refusal(problem: Problem) -> Answer:
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
