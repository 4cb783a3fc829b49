"""A run as one message of the Messages API. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tokenbus.client.response import ResponseBuilder
from tokenbus.core.run.blocks.tool_arguments import parse_arguments
from tokenbus.events.public import TERMINAL, BlockComplete, Completed, PublicEvent
from tokenbus_services.gateway.problem import Problem, of_end
from tokenbus_services.gateway.surfaces.answering import Echo
from tokenbus_services.gateway.surfaces.anthropic_messages.answer import (
    Json,
    ending,
    message_of,
    redacted_of,
    signature_of,
    usage_of,
)
from tokenbus_services.gateway.surfaces.anthropic_messages.errors import error_body, status_of
from tokenbus_services.gateway.surfaces.contract import Answer, WholeAnswer

_encode = msgspec.json.Encoder().encode


class WholeMessageAnswer(WholeAnswer):
    def __init__(self, run: str, model: str, echo: Echo) -> None:
        self._run = run
        self._model = model
        self._echo = echo
        self._builder = ResponseBuilder()

    def feed(self, event: PublicEvent) -> Answer | None:
        self._builder.add(event)
        if not isinstance(event, TERMINAL):
            return None
        if not isinstance(event, Completed):
            return refusal(of_end(event))
        content = list(_content(self._builder.response.blocks, self._echo))
        end = {**ending(event, self._echo), "usage": usage_of(event, self._echo)}
        return Answer(status=200, body=_encode(message_of(self._run, self._model, content, **end)))


def refusal(problem: Problem) -> Answer:
    """The error response."""
    return Answer(status=status_of(problem), body=error_body(problem))


def _content(blocks: Iterable[BlockComplete], echo: Echo) -> Iterable[Json]:
    for block in blocks:
        match block.kind:
            case "text" if block.content:
                yield {"type": "text", "text": block.content}
            case "thinking":
                if data := redacted_of(block):
                    yield {"type": "redacted_thinking", "data": data}
                elif block.content or signature_of(block):
                    yield {"type": "thinking", "thinking": block.content or "", "signature": signature_of(block)}
            case "tool_call" if not echo.bus_tools:
                yield {"type": "tool_use", "id": block.tool_id, "name": block.tool_name, "input": _input(block)}
            case _:
                pass


def _input(block: BlockComplete) -> Json:
    """The arguments as an object. Invalid JSON has no other form here; the model sees it beside its error result."""
    if block.input is not None:
        return block.input
    parsed, _ = parse_arguments(block.arguments or "")
    return {"invalid_arguments": block.arguments} if parsed is None else parsed
