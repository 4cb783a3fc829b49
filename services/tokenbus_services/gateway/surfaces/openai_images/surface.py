"""The Images API as a surface of the gateway."""

from __future__ import annotations

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
from tokenbus_services.gateway.surfaces.openai_errors import refusal
from tokenbus_services.gateway.surfaces.openai_images.images import ImageStream, WholeImages
from tokenbus_services.gateway.surfaces.openai_images.request import translate


class OpenAIImagesSurface(Surface):
    """`POST /v1/images/generations`."""

    name = "openai_images"
    keep_alive = b": keep-alive\n\n"

    def translate(self, request: GatewayRequest, rules: TranslationRules) -> Translated:
        return translate(request, rules)

    def encoder(self, request: GatewayRequest | None, note: GatewayNote, run: str) -> Encoder:
        return ImageStream(note, run)

    def whole(self, note: GatewayNote, run: str) -> WholeAnswer:
        return WholeImages(note, run)

    def refusal(self, problem: Problem) -> Answer:
        return refusal(problem)
