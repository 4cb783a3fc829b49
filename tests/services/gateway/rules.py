"""What a gateway of tests allows, and requests to it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tokenbus.providers.api import ApiName
from tokenbus_services.gateway.models import ModelTable, RoutedModel
from tokenbus_services.gateway.problem import Problem, Refusal
from tokenbus_services.gateway.surfaces.contract import GatewayNote, GatewayRequest, Translated, TranslationRules
from tokenbus_services.gateway.surfaces.surface import Echo, Surface

APIS: dict[str, ApiName] = {
    "anthropic": "anthropic",
    "openai": "openai-chat",
    "responses": "openai-responses",
    "gemini": "gemini",
}
ALIASES = {"fast": [RoutedModel("gemini", "flash"), RoutedModel("anthropic", "haiku")]}


def rules(**changes: Any) -> TranslationRules:
    return TranslationRules(models=ModelTable(APIS, ALIASES), **changes)


def gateway_request(body: object, *, headers: dict[str, str] | None = None, **more: Any) -> GatewayRequest:
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return GatewayRequest(body=data, headers=headers or {}, **more)


def refused(surface: Surface, request: GatewayRequest, allowed: TranslationRules | None = None) -> Problem:
    with pytest.raises(Refusal) as caught:
        surface.translate(request, allowed or rules())
    return caught.value.problem


def translated(surface: Surface, request: GatewayRequest, allowed: TranslationRules | None = None) -> Translated:
    return surface.translate(request, allowed or rules())


def noted(echo: Echo) -> GatewayNote:
    return GatewayNote(surface="s", version=1, created=0, model="m", echo=msgspec.to_builtins(echo))
