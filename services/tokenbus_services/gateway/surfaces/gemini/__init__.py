"""The Gemini API: `models/M:generateContent` and `models/M:streamGenerateContent`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenbus.events.waits import WaitKind
from tokenbus_services.gateway.surfaces.contract import Answer, Encoder, GatewayNote, GatewayRequest, WholeAnswer
from tokenbus_services.gateway.surfaces.errors import gemini_refusal
from tokenbus_services.gateway.surfaces.gemini.answer import ArrayStream, EventStream, whole_response
from tokenbus_services.gateway.surfaces.gemini.request import KEY_IN_URL, METHODS, camel, read
from tokenbus_services.gateway.surfaces.surface import Surface

__all__ = ["KEY_IN_URL", "METHODS", "GeminiArray", "GeminiSurface", "model_answer", "models_answer"]


class GeminiSurface(Surface):
    """`generateContent`, and `streamGenerateContent` with `alt=sse`."""

    name = "gemini"
    door = "gemini"
    inlines_media = True
    keep_alive = b"\n"
    spelling = staticmethod(camel)
    read = staticmethod(read)
    refusal = staticmethod(gemini_refusal)

    def waits_for(self, note: GatewayNote) -> frozenset[WaitKind]:
        """See `Surface.waits_for`."""
        return frozenset({"tool_result"})

    def encoder(self, request: GatewayRequest | None, note: GatewayNote, run: str) -> Encoder:
        return EventStream(note, run)

    def whole(self, note: GatewayNote, run: str) -> WholeAnswer:
        return whole_response(note, run)


class GeminiArray(GeminiSurface):
    """`streamGenerateContent` without `alt=sse`: one JSON array, in which blank space is no content either."""

    media_type = "application/json; charset=utf-8"

    def encoder(self, request: GatewayRequest | None, note: GatewayNote, run: str) -> Encoder:
        return ArrayStream(note, run)


def models_answer(names: Sequence[str]) -> Answer:
    """The answer of `GET /v1beta/models`."""
    return Answer(status=200, body=msgspec.json.encode({"models": [_model(name) for name in names]}))


def model_answer(name: str) -> Answer:
    """The answer of `GET /v1beta/models/{name}`."""
    return Answer(status=200, body=msgspec.json.encode(_model(name)))


def _model(name: str) -> dict[str, object]:
    return {"name": f"models/{name}", "displayName": name, "supportedGenerationMethods": list(METHODS)}
