"""The table of docs/guides/gateway.md: what each surface does with each option, found by asking it.

`python -m tests.services.gateway.conformance` writes it, and the table of what is forwarded.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tests.services.gateway.rules import APIS, rules
from tokenbus_services.gateway.forward.table import TABLE
from tokenbus_services.gateway.models import ModelTable, RoutedModel
from tokenbus_services.gateway.problem import Refusal
from tokenbus_services.gateway.surfaces.ag_ui import AgUiSurface
from tokenbus_services.gateway.surfaces.ai_sdk_ui import AiSdkUiSurface
from tokenbus_services.gateway.surfaces.anthropic_messages import AnthropicMessagesSurface
from tokenbus_services.gateway.surfaces.contract import GatewayRequest, Translated
from tokenbus_services.gateway.surfaces.gemini import GeminiSurface
from tokenbus_services.gateway.surfaces.openai_chat import OpenAIChatSurface
from tokenbus_services.gateway.surfaces.openai_images import OpenAIImagesSurface
from tokenbus_services.gateway.surfaces.openai_responses import OpenAIResponsesSurface
from tokenbus_services.gateway.surfaces.surface import ONLY_JSON, Surface

Json = dict[str, Any]
PAGE = Path(__file__).parents[3] / "docs" / "guides" / "gateway.md"
SURFACES: dict[str, tuple[Surface, Json]] = {
    "Chat": (OpenAIChatSurface(), {"messages": [{"role": "user", "content": "x"}]}),
    "Responses": (OpenAIResponsesSurface(), {"input": "x"}),
    "Messages": (AnthropicMessagesSurface(), {"max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}),
    "Gemini": (GeminiSurface(), {"contents": [{"parts": [{"text": "x"}]}]}),
    "Images": (OpenAIImagesSurface(), {"prompt": "x"}),
    "useChat": (
        AiSdkUiSurface(),
        {"id": "c", "messages": [{"id": "m", "role": "user", "parts": [{"type": "text", "text": "x"}]}]},
    ),
    "AG-UI": (
        AgUiSurface(),
        {"threadId": "t", "runId": "r", "tools": [], "messages": [{"id": "m", "role": "user", "content": "x"}],
         "forwardedProps": {}},
    ),
}  # fmt: skip
BUS: dict[str, Json] = {
    "run": {"run": "mine"},
    "tools": {"tools": ["weather"]},
    "max_tool_depth": {"tools": ["weather"], "max_tool_depth": 2},
    "on_failure": {"on_failure": "fail"},
    "deadline_s": {"deadline_s": 3},
    "policies": {"policies": ["p"]},
    "input_policies": {"input_policies": ["p"]},
    "webhooks": {"webhooks": ["w"]},
    "visible": {"visible": False},
    "record": {"record": True},
    "stream": {"stream": False},
    "on_disconnect": {},
    "extra": {"extra": {"a": 1}},
}
_SCHEMA: Json = {"type": "object"}
_CONFIG = "generationConfig"
_URL = "https://a.example/b.png"
_STRICT: Json = {"name": "f", "strict": True}
FIELDS: dict[str, dict[str, Json]] = {
    "temperature": {
        **{name: {"temperature": 0.5} for name in ("Chat", "Responses", "Messages", "useChat")},
        "Gemini": {_CONFIG: {"temperature": 0.5}},
        "AG-UI": {"forwardedProps": {"temperature": 0.5}},
    },
    "top_k": {"Messages": {"top_k": 3}, "Gemini": {_CONFIG: {"topK": 3}}, "useChat": {"topK": 3}},
    "seed": {"Chat": {"seed": 7}, "Gemini": {_CONFIG: {"seed": 7}}, "useChat": {"seed": 7}},
    "penalties": {
        "Chat": {"presence_penalty": 1},
        "Gemini": {_CONFIG: {"presencePenalty": 1}},
        "useChat": {"presencePenalty": 1},
    },
    "one call at a time": {
        "Chat": {"parallel_tool_calls": False},
        "Responses": {"parallel_tool_calls": False},
        "Messages": {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    },
    "one call of the only tool": {
        "Chat": {"parallel_tool_calls": False, "tool_choice": "required",
                 "tools": [{"type": "function", "function": {"name": "f"}}]},
        "Responses": {"parallel_tool_calls": False, "tool_choice": "required",
                      "tools": [{"type": "function", "name": "f"}]},
        "Messages": {"tool_choice": {"type": "any", "disable_parallel_tool_use": True},
                     "tools": [{"name": "f", "input_schema": _SCHEMA}]},
    },
    "a weaker filter": {"Gemini": {"safetySettings": [{"category": "c", "threshold": "BLOCK_ONLY_HIGH"}]}},
    "a stronger filter": {"Gemini": {"safetySettings": [{"category": "c", "threshold": "BLOCK_LOW_AND_ABOVE"}]}},
    "id of the user": {
        "Chat": {"user": "u"}, "Responses": {"user": "u"}, "Messages": {"metadata": {"user_id": "u"}},
        "Images": {"user": "u"},
    },
    "strict tools": {
        "Chat": {"tools": [{"type": "function", "function": _STRICT}]},
        "Responses": {"tools": [{"type": "function", **_STRICT}]},
        "Messages": {"tools": [{**_STRICT, "input_schema": _SCHEMA}]},
        "Gemini": {"toolConfig": {"functionCallingConfig": {"mode": "VALIDATED"}}},
        "useChat": {"tools": [_STRICT]},
    },
    "custom tools": {
        "Chat": {"tools": [{"type": "custom", "custom": {"name": "f"}}]},
        "Responses": {"tools": [{"type": "custom", "name": "f"}]},
    },
    "JSON by a schema": {
        "Chat": {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}}},
        "Responses": {"text": {"format": {"type": "json_schema", "name": "n", "schema": _SCHEMA}}},
        "Messages": {"output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}}},
        "Gemini": {_CONFIG: {"responseMimeType": "application/json", "responseJsonSchema": _SCHEMA}},
    },
    "JSON of any schema": {
        "Chat": {"response_format": {"type": "json_object"}},
        "Responses": {"text": {"format": {"type": "json_object"}}},
        "Gemini": {_CONFIG: {"responseMimeType": "application/json"}},
    },
    "detail of an image": {
        "Chat": {"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": _URL, "detail": "low"}}]}]},
        "Responses": {"input": [{"role": "user", "content": [
            {"type": "input_image", "image_url": _URL, "detail": "low"}]}]},
        "Gemini": {_CONFIG: {"mediaResolution": "MEDIA_RESOLUTION_LOW"}},
    },
    "service tier": {"Chat": {"service_tier": "flex"}, "Responses": {"service_tier": "flex"},
                     "Messages": {"service_tier": "standard_only"}},
    "hosted tools": {
        "Chat": {"web_search_options": {}},
        "Responses": {"tools": [{"type": "web_search"}]},
        "Messages": {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "Gemini": {"tools": [{"googleSearch": {}}]},
    },
    "several answers": {"Chat": {"n": 2}, "Gemini": {_CONFIG: {"candidateCount": 2}}},
    "an unknown field": {name: {"unheard_of": 1} for name in SURFACES},
}  # fmt: skip
ORDER = ("honoured", "passed", "in words", "left out", "refused")


def ask(
    name: str,
    api: str,
    changes: Json,
    *,
    drop: Collection[str] = (),
    headers: Mapping[str, str] | None = None,
    aliases: Mapping[str, Sequence[RoutedModel]] | None = None,
) -> Translated:
    """Translate a request with these changes for a provider of this API, or one of ``aliases``, with ``drop`` as
    `drop_unsupported`. Raises Refusal.
    """
    surface, body = SURFACES[name]
    body = {**copy.deepcopy(body), **changes}
    model = api if aliases else f"{api}/m"
    if name == "AG-UI":
        body["forwardedProps"] = {"model": model, **body["forwardedProps"]}
    elif name != "Gemini":
        body["model"] = model
    path = {"model": model, "method": "generateContent"} if name == "Gemini" else {}
    allowed = rules(tools=None, allow_extra=frozenset({"a"}), drop_unsupported=frozenset(drop))
    if aliases:
        allowed = msgspec.structs.replace(allowed, models=ModelTable(APIS, aliases))
    asked = GatewayRequest(body=msgspec.json.encode(body), headers=headers or {}, path=path)
    return surface.translate(asked, allowed)


def outcome(name: str, api: str, changes: Json) -> str:
    """What becomes of an option."""
    try:
        found = ask(name, api, changes)
    except Refusal:
        return "refused"
    base = ask(name, api, {})
    if found.left_out:
        return "left out"
    before, after = (msgspec.structs.asdict(each.generate) for each in (base, found))
    changed = {field for field in after if after[field] != before[field]}
    if ONLY_JSON in str(found.generate.system):
        return "in words"
    if changed == {"extra"} or (
        changed == {"messages"} and re.search("ExtraPart|extra={", str(found.generate.messages))
    ):
        return "passed"
    assert changed or (found.run, found.on_disconnect) != (base.run, base.on_disconnect), (name, api, changes)
    return "honoured"


def cell(name: str, outcomes: set[str]) -> str:
    return ", ".join(word for word in ORDER if word in outcomes)


def with_options(name: str, options: Json) -> Json:
    """The object of the bus's options, where the surface has it."""
    return {"forwardedProps": {"tokenbus": options}} if name == "AG-UI" else {"tokenbus": options}


def bus_outcome(name: str, option: str, options: Json) -> str:
    if option == "on_disconnect":
        usual = ask(name, "openai", {}).on_disconnect
        options = {"on_disconnect": "cancel" if usual == "continue" else "continue"}
    found = outcome(name, "openai", with_options(name, options))
    return "honoured" if found == "passed" else found


def table() -> str:
    rows = [["", *SURFACES], ["---"] * (1 + len(SURFACES))]
    for option, options in BUS.items():
        rows.append([f"`tokenbus.{option}`", *(bus_outcome(name, option, options) for name in SURFACES)])
    for field, of_surface in FIELDS.items():
        cells = [
            cell(name, {outcome(name, api, of_surface[name]) for api in APIS}) if name in of_surface else ""
            for name in SURFACES
        ]
        rows.append([field, *cells])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def forwarded() -> str:
    rows = [["`forward`", "path", "what it does", "providers that speak", "costs"], ["---"] * 5]
    for path in TABLE:
        base = {"openai": "/v1", "anthropic": "/anthropic/v1", "gemini": "/gemini/v1beta"}[path.family]
        apis = "any of OpenAI" if path.family == "openai" and not path.apis else ", ".join(path.providers)
        cost = "tokens in and out" if path.has_output else "tokens in" if path.is_metered else ""
        rows.append([f"`{path.kind}`", f"`{path.method} {base}{path.path}`", path.what, apis, cost])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


TABLES: dict[str, Callable[[], str]] = {"conformance": table, "forwarded": forwarded}


def published(name: str) -> str:
    """A table as the page has it."""
    return PAGE.read_text().partition(f"<!-- {name}: generated -->\n")[2].partition(f"<!-- /{name} -->\n")[0]


if __name__ == "__main__":
    for name, made in TABLES.items():
        begin, end = f"<!-- {name}: generated -->\n", f"<!-- /{name} -->\n"
        before, _, rest = PAGE.read_text().partition(begin)
        PAGE.write_text(before + begin + made() + end + rest.partition(end)[2])
