"""The surface: its requests, its encoders, and its form of an error."""

from __future__ import annotations

from tokenbus_services.gateway.problem import Problem
from tokenbus_services.gateway.surfaces.contract import (
    Answer,
    GatewayNote,
    GatewayRequest,
    Surface,
    Translated,
    TranslationRules,
)
from tokenbus_services.gateway.surfaces.openai_chat.encoder import ChatEncoder
from tokenbus_services.gateway.surfaces.openai_chat.errors import refusal
from tokenbus_services.gateway.surfaces.openai_chat.request import translate
from tokenbus_services.gateway.surfaces.openai_chat.whole import WholeChat


class OpenAIChatSurface(Surface):
    """Chat Completions as the official clients of Python and JavaScript read it.

    No line of its streams has an `id:` or `event:`: the Python client takes what follows them for an empty chunk.
    """

    name = "openai_chat"
    keep_alive = b": keep-alive\n\n"

    def translate(self, request: GatewayRequest, rules: TranslationRules) -> Translated:
        return translate(request, rules)

    def encoder(self, request: GatewayRequest | None, note: GatewayNote, run: str) -> ChatEncoder:
        return ChatEncoder(note, run)

    def whole(self, note: GatewayNote, run: str) -> WholeChat:
        return WholeChat(note, run)

    def refusal(self, problem: Problem) -> Answer:
        return refusal(problem)
