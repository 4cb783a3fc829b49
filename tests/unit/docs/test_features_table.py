"""The table of features in docs/guides/providers.md: what each API's request builder makes of each."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.docs.pages import page, rows, sections
from tokenbus.core.request.parse import request_from
from tokenbus.errors import RequestInvalid
from tokenbus.events.quirks import Quirks
from tokenbus.events.requests import Generate
from tokenbus.providers import registry

APIS = ("anthropic", "openai-chat", "openai-responses", "gemini", "gemini-interactions")
SECTION = sections(page("guides/providers.md"))["Features by API"]
HI: dict[str, Any] = {"role": "user", "content": "Hi"}
PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
IMAGE: dict[str, Any] = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="},
}
TOOLS: dict[str, Any] = {"tools": [{"name": "weather", "parameters": {"type": "object"}}]}


def user(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def answered(*parts: Any) -> dict[str, Any]:
    return {"messages": [HI, {"role": "assistant", "content": [*parts, {"type": "text", "text": "Hello"}]}, HI]}


def text(**more: Any) -> dict[str, Any]:
    return {"type": "text", "text": "Hi", **more}


def document(**more: Any) -> dict[str, Any]:
    return {"type": "document", "source": PDF, **more}


FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "system text": ({}, {"system": "Be kind."}),
    "system text in the middle": ({"messages": [HI]}, {"messages": [HI, {"role": "system", "content": "Be brief."}]}),
    "a participant's name": ({}, {"messages": [{**HI, "participant": "Ann"}]}),
    "an image": (user(text()), user(text(), IMAGE)),
    "`detail` of an image": (user(IMAGE), user({**IMAGE, "detail": "low"})),
    "a document": (user(text()), user(text(), document())),
    "`title` of a document": (user(document()), user(document(title="Report"))),
    "`citations` of a document": (user(document()), user(document(citations=True))),
    "`context` of a document": (user(document()), user(document(context="A draft."))),
    "`cache`": (user(text()), user(text(cache=True))),
    "`cache` with a time": (user(text(cache=True)), user(text(cache="1h"))),
    "a tool": ({}, TOOLS),
    "`strict` of a tool": (TOOLS, {"tools": [{**TOOLS["tools"][0], "strict": True}]}),
    "`format` of a tool": (TOOLS, {"tools": [{"name": "sql", "format": {"type": "text"}}]}),
    "`tool_choice`": (TOOLS, {**TOOLS, "tool_choice": "any"}),
    "`parallel_tool_calls` false": (TOOLS, {**TOOLS, "parallel_tool_calls": False}),
    "`thinking.effort`": ({"thinking": {}}, {"thinking": {"effort": "low"}}),
    "`thinking.budget_tokens`": ({"thinking": {}}, {"thinking": {"budget_tokens": 2000}}),
    "`thinking.display`": ({"thinking": {}}, {"thinking": {"display": "omitted"}}),
    "thinking without a signature": (answered(), answered({"type": "thinking", "text": "Hm."})),
    "thinking that Anthropic signed": (
        answered(),
        answered({"type": "thinking", "text": "Hm.", "signature": "s", "opaque": {"api": "anthropic"}}),
    ),
    "an item of Anthropic's own": (
        answered(),
        answered({"type": "extra", "name": "anthropic.x", "json": '{"type":"x"}'}),
    ),
    "`extra`": ({}, {"extra": {"x": 1}}),
    "`output_schema`": ({}, {"output_schema": {"schema": {"type": "object"}}}),
    "`json_object`": ({}, {"json_object": True}),
    "`images`": ({}, {"images": {}}),
    "`stop`": ({}, {"stop": ["END"]}),
    "`temperature`": ({}, {"temperature": 0.5}),
    "`top_p`": ({}, {"top_p": 0.5}),
    "`top_k`": ({}, {"top_k": 5}),
    "`seed`": ({}, {"seed": 5}),
    "`frequency_penalty`": ({}, {"frequency_penalty": 0.5}),
    "`presence_penalty`": ({}, {"presence_penalty": 0.5}),
    "`user_id`": ({}, {"user_id": "u"}),
    "mode `prefill`": ({}, {"mode": "prefill", "participant": "Claude"}),
}
"""By row: a request, and the same with the feature."""


def made(api: str, fields: dict[str, Any]) -> tuple[bytes, tuple[str, ...]]:
    base = {"type": "generate", "provider": api, "model": "newest", "messages": [HI]}
    request = request_from({**base, **fields})
    assert isinstance(request, Generate)
    built = registry.get(api).build(request, [], Quirks())
    return built.call.path.encode() + built.call.body, built.notes


def outcome(api: str, without: dict[str, Any], with_it: dict[str, Any]) -> str:
    """What becomes of the feature, in the table's words."""
    body, notes = made(api, without)
    try:
        changed, noted = made(api, with_it)
    except RequestInvalid:
        return "refused"
    words = (["sent"] if changed != body else []) + (["noted"] if set(noted) - set(notes) else [])
    return ", ".join(words) or "no effect"


def test_the_table_has_each_feature() -> None:
    assert [row[0] for row in rows(SECTION)] == list(FEATURES)


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_is_sent_noted_or_refused_as_the_table_says(feature: str) -> None:
    (row,) = [row for row in rows(SECTION) if row[0] == feature]
    assert row[1:] == [outcome(api, *FEATURES[feature]) for api in APIS]


def test_the_columns_are_the_apis() -> None:
    header = next(line for line in SECTION.splitlines() if line.startswith("| feature"))
    assert header.strip("| ").split(" | ")[1:] == list(APIS)
