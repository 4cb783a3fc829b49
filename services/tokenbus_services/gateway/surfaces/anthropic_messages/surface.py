"""The surface of Anthropic's Messages API. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from tokenbus_services.gateway.problem import Problem
from tokenbus_services.gateway.surfaces.answering import read_echo
from tokenbus_services.gateway.surfaces.anthropic_messages.encoder import MessagesStream
from tokenbus_services.gateway.surfaces.anthropic_messages.request import translate
from tokenbus_services.gateway.surfaces.anthropic_messages.whole import WholeMessageAnswer, refusal
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

_NEVER = "1970-01-01T00:00:00Z"
"""`created_at` of models: the API's own value for an unknown date."""


class AnthropicMessagesSurface(Surface):
    name: ClassVar[str] = "anthropic_messages"
    keep_alive: ClassVar[bytes] = b'event: ping\ndata: {"type": "ping"}\n\n'

    def translate(self, request: GatewayRequest, rules: TranslationRules) -> Translated:
        return translate(request, rules)

    def encoder(self, request: GatewayRequest | None, note: GatewayNote, run: str) -> Encoder:
        return MessagesStream(run, note.model, read_echo(note.echo))

    def whole(self, note: GatewayNote, run: str) -> WholeAnswer:
        return WholeMessageAnswer(run, note.model, read_echo(note.echo))

    def refusal(self, problem: Problem) -> Answer:
        return refusal(problem)


def models_answer(names: Sequence[str]) -> Answer:
    """The answer of `GET /v1/models` in this API's form."""
    models = [_model(name) for name in names]
    page = {
        "data": models,
        "has_more": False,
        "first_id": names[0] if names else None,
        "last_id": names[-1] if names else None,
    }
    return Answer(status=200, body=msgspec.json.encode(page))


def model_answer(name: str) -> Answer:
    """The answer of `GET /v1/models/{name}`."""
    return Answer(status=200, body=msgspec.json.encode(_model(name)))


def _model(name: str) -> dict[str, object]:
    return {"type": "model", "id": name, "display_name": name, "created_at": _NEVER, "lifecycle": "active"}
