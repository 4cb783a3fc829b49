"""A run as one response of the Gemini API. Pure."""

from __future__ import annotations

import msgspec

from tokenbus.client.response import ResponseBuilder
from tokenbus.events.public import TERMINAL, Completed, PublicEvent
from tokenbus_services.gateway.problem import Problem, of_end
from tokenbus_services.gateway.surfaces import contract
from tokenbus_services.gateway.surfaces.gemini.answer import AnswerWriter, GeminiEcho
from tokenbus_services.gateway.surfaces.gemini.errors import error_body


class WholeResponse(contract.WholeAnswer):
    def __init__(self, run: str, model: str, echo: GeminiEcho) -> None:
        self._answer = AnswerWriter(run, model, echo)
        self._builder = ResponseBuilder()

    def feed(self, event: PublicEvent) -> contract.Answer | None:
        self._builder.add(event)
        if not isinstance(event, TERMINAL):
            return None
        if not isinstance(event, Completed):
            return refusal(of_end(event))
        parts = [part for block in self._builder.response.blocks if (part := self._answer.whole(block))]
        return contract.Answer(status=200, body=msgspec.json.encode(self._answer.response(parts, event)))


def refusal(problem: Problem) -> contract.Answer:
    """The error response."""
    return contract.Answer(status=problem.status, body=error_body(problem))
