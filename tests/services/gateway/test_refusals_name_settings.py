"""A refusal that an operator can lift names the setting for it, in every protocol that can be refused so."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.services.gateway.rules import APIS, gateway_request, refused, rules
from tokenbus.events.requests import Generate, Message, TextPart, Tool
from tokenbus_services.gateway.callers import Caller
from tokenbus_services.gateway.keys.allowed import check_allowed, check_tools, rules_for
from tokenbus_services.gateway.problem import Refusal
from tokenbus_services.gateway.surfaces.ai_sdk_ui import AiSdkUiSurface
from tokenbus_services.gateway.surfaces.native import NativeSurface
from tokenbus_services.gateway.surfaces.openai_chat import OpenAIChatSurface
from tokenbus_services.gateway.surfaces.surface import Surface
from tokenbus_services.settings.tables.gateway import KeyRules

HELLO = [{"role": "user", "content": "Hello?"}]
CHAT = {"model": "anthropic/haiku", "messages": HELLO}
NATIVE = {"provider": "anthropic", "model": "haiku", "messages": HELLO}
UI = {
    "id": "chat",
    "model": "anthropic/haiku",
    "messages": [{"role": "user", "parts": [{"type": "text", "text": "Hello?"}]}],
}
TOOLS, EXTRA = "gateway.tools", "gateway.allow_extra"


@pytest.mark.parametrize(
    ("surface", "body", "headers", "setting"),
    [
        (OpenAIChatSurface(), {**CHAT, "tokenbus": {"tools": ["shell"]}}, {}, TOOLS),
        (OpenAIChatSurface(), CHAT, {"x-tokenbus-tools": "shell"}, TOOLS),
        (OpenAIChatSurface(), {**CHAT, "tokenbus": {"extra": {"top_k": 4}}}, {}, EXTRA),
        (NativeSurface(), {**NATIVE, "tools": [{"name": "shell"}]}, {}, TOOLS),
        (NativeSurface(), {**NATIVE, "extra": {"top_k": 4}}, {}, EXTRA),
        (AiSdkUiSurface(), {**UI, "tools": ["shell"]}, {}, TOOLS),
    ],
)
def test_what_the_deployment_does_not_open_is_refused_with_its_setting(
    surface: Surface, body: object, headers: Mapping[str, str], setting: str
) -> None:
    assert setting in refused(surface, gateway_request(body, headers=dict(headers))).message


def test_what_a_key_does_not_open_is_refused_with_its_field() -> None:
    generate = Generate(
        provider="anthropic",
        model="haiku",
        messages=[Message(role="user", content=[TextPart(text="Hello?")])],
        tools=[Tool(name="shell")],
    )
    key = KeyRules(models=("gemini/*",), tools=())
    with pytest.raises(Refusal, match="`tools` of a key"):
        check_tools(generate, key.tools, {"shell": True})
    with pytest.raises(Refusal, match="`models` of the key"):
        check_allowed(generate, key, {})
    with pytest.raises(Refusal, match="`models` of the key"):
        rules_for(key, rules()).models.resolve(f"{next(iter(APIS))}/haiku")
    with pytest.raises(Refusal, match="`surfaces` of the key"):
        Caller(rules=rules(), surfaces=frozenset[str](("native",))).may_use("gemini")
