"""The surface of the Gemini API. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from tokenbus_services.gateway.problem import Problem
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
from tokenbus_services.gateway.surfaces.gemini.answer import GeminiEcho
from tokenbus_services.gateway.surfaces.gemini.encoder import ArrayStream, EventStream
from tokenbus_services.gateway.surfaces.gemini.request import METHODS, translate
from tokenbus_services.gateway.surfaces.gemini.whole import WholeResponse, refusal


class GeminiSurface(Surface):
    """`generateContent`, and `streamGenerateContent` with `alt=sse`."""

    name: ClassVar[str] = "gemini"
    keep_alive: ClassVar[bytes] = b"\n"

    def translate(self, request: GatewayRequest, rules: TranslationRules) -> Translated:
        return translate(request, rules)

    def encoder(self, request: GatewayRequest | None, note: GatewayNote, run: str) -> Encoder:
        return EventStream(run, note.model, _echo(note))

    def whole(self, note: GatewayNote, run: str) -> WholeAnswer:
        return WholeResponse(run, note.model, _echo(note))

    def refusal(self, problem: Problem) -> Answer:
        return refusal(problem)


class GeminiArray(GeminiSurface):
    """`streamGenerateContent` without `alt=sse`: one JSON array, in which blank space is no content either."""

    media_type: ClassVar[str] = "application/json; charset=utf-8"

    def encoder(self, request: GatewayRequest | None, note: GatewayNote, run: str) -> Encoder:
        return ArrayStream(run, note.model, _echo(note))


def models_answer(names: Sequence[str]) -> Answer:
    """The answer of `GET /v1beta/models`."""
    return Answer(status=200, body=msgspec.json.encode({"models": [_model(name) for name in names]}))


def model_answer(name: str) -> Answer:
    """The answer of `GET /v1beta/models/{name}`."""
    return Answer(status=200, body=msgspec.json.encode(_model(name)))


def _model(name: str) -> dict[str, object]:
    return {"name": f"models/{name}", "displayName": name, "supportedGenerationMethods": list(METHODS)}


def _echo(note: GatewayNote) -> GeminiEcho:
    return msgspec.convert(note.echo, GeminiEcho)
