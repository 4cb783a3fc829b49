"""Options of one object of a request: they are in just that object, for the API that has them, or a note names them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tokenbus.core.request.parse import request_from
from tokenbus.errors import RequestInvalid
from tokenbus.events.quirks import Quirks
from tokenbus.events.requests import Generate
from tokenbus.providers import registry
from tokenbus.providers.api import Built

APIS = ("anthropic", "openai-chat", "openai-responses", "gemini", "gemini-interactions")
URL = "https://example.org/picture"


def built(api: str, *, model: str = "m", quirks: Quirks | None = None, **fields: Any) -> Built:
    base = {"type": "generate", "provider": api, "model": model, "messages": [{"role": "user", "content": "Hi"}]}
    request = request_from({**base, **fields})
    assert isinstance(request, Generate)
    return registry.get(api).build(request, [], quirks or Quirks())


def body(api: str, **fields: Any) -> Any:
    return json.loads(built(api, **fields).call.body)


def objects_with(value: Any, mark: str) -> list[Any]:
    """All objects of the body that have this key, however deep."""
    if isinstance(value, list):
        return [found for one in value for found in objects_with(one, mark)]
    if not isinstance(value, dict):
        return []
    inner = [found for one in value.values() for found in objects_with(one, mark)]
    return [value, *inner] if mark in value else inner


def marked(api: str, name: str) -> dict[str, Any]:
    return {"extra": {api: {name: {"x": 1}}}}


def conversation(api: str) -> dict[str, Any]:
    """A request in which every object has a field of its own for this API."""
    call = {"type": "tool_call", "tool_id": "c1", "tool_name": "f", "arguments": "{}"}
    return {
        "tools": [{"name": "f", "parameters": {"type": "object"}, **marked(api, "on_tool")}, {"name": "g"}],
        "system": [{"type": "text", "text": "Be kind.", **marked(api, "on_system")}],
        "messages": [
            {
                "role": "user",
                **marked(api, "on_message"),
                "content": [
                    {"type": "text", "text": "Look", **marked(api, "on_text")},
                    {"type": "text", "text": "at it"},
                    {"type": "image", "source": {"type": "url", "url": URL}, **marked(api, "on_image")},
                    {
                        "type": "document",
                        "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="},
                        **marked(api, "on_document"),
                    },
                ],
            },
            {"role": "assistant", "content": [{**call, **marked(api, "on_call")}]},
            {
                "role": "tool",
                "content": [{"type": "tool_result", "tool_id": "c1", "content": "Rain", **marked(api, "on_result")}],
            },
        ],
    }


KINDS = {
    "on_tool": {
        "anthropic": ("name", "f"),
        "openai-chat": ("type", "function"),
        "openai-responses": ("name", "f"),
        "gemini": ("name", "f"),
        "gemini-interactions": ("type", "function"),
    },
    "on_text": {
        "anthropic": ("text", "Look"),
        "openai-chat": ("text", "Look"),
        "openai-responses": ("text", "Look"),
        "gemini": ("text", "Look"),
        "gemini-interactions": ("text", "Look"),
    },
    "on_image": {
        "anthropic": ("type", "image"),
        "openai-chat": ("type", "image_url"),
        "openai-responses": ("type", "input_image"),
        "gemini": ("fileData", {"fileUri": URL}),
        "gemini-interactions": ("type", "image"),
    },
    "on_document": {
        "anthropic": ("type", "document"),
        "openai-chat": ("type", "file"),
        "openai-responses": ("type", "input_file"),
        "gemini": ("inlineData", {"mimeType": "application/pdf", "data": "JVBERi0="}),
        "gemini-interactions": ("type", "document"),
    },
    "on_call": {
        "anthropic": ("type", "tool_use"),
        "openai-chat": ("id", "c1"),
        "openai-responses": ("type", "function_call"),
        "gemini": ("functionCall", {"name": "f", "args": {}}),
        "gemini-interactions": ("type", "function_call"),
    },
    "on_result": {
        "anthropic": ("type", "tool_result"),
        "openai-chat": ("role", "tool"),
        "openai-responses": ("type", "function_call_output"),
        "gemini": ("functionResponse", {"name": "f", "response": {"output": "Rain"}}),
        "gemini-interactions": ("type", "function_result"),
    },
    "on_message": dict.fromkeys(APIS, ("role", "user")) | {"gemini-interactions": ("type", "user_input")},
}
"""A key and a value by which the object is known that must have the field."""


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("mark", KINDS)
def test_further_fields_are_in_just_their_object_for_the_api_that_they_name(api: str, mark: str) -> None:
    [found] = objects_with(body(api, **conversation(api)), mark)
    key, value = KINDS[mark][api]
    assert (found[key], found[mark]) == (value, {"x": 1})


@pytest.mark.parametrize("api", APIS)
def test_further_fields_for_another_api_change_nothing(api: str) -> None:
    other = "gemini" if api != "gemini" else "anthropic"
    plain = conversation(api)
    for one in (*plain["tools"], *plain["system"], *plain["messages"], *plain["messages"][0]["content"]):
        one.pop("extra", None)
    for message in plain["messages"][1:]:
        message["content"][0].pop("extra")
    assert body(api, **conversation(other)) == body(api, **plain)


def test_further_fields_for_an_api_that_there_is_not_are_refused() -> None:
    with pytest.raises(RequestInvalid, match=r"tools\[0\].extra: no API has the name 'antropic': must be one of"):
        built("anthropic", tools=[{"name": "f", "extra": {"antropic": {"x": 1}}}])


def test_a_cache_mark_says_for_how_long_and_apis_without_lifetimes_get_a_note() -> None:
    def with_mark(mark: Any) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "cache": mark}]}]}

    [block] = body("anthropic", **with_mark("1h"))["messages"][0]["content"]
    assert block["cache_control"] == {"type": "ephemeral", "ttl": "1h"}
    [block] = body("anthropic", **with_mark(True))["messages"][0]["content"]
    assert block["cache_control"] == {"type": "ephemeral"}
    assert built("anthropic", **with_mark("1h")).notes == ()
    router = built("openai-chat", quirks=Quirks(cache_marks=True), **with_mark("1h"))
    assert b'"cache_control":{"type":"ephemeral","ttl":"1h"}' in router.call.body
    for api in ("openai-responses", "gemini", "openai-chat"):
        assert built(api, **with_mark("5m")).notes == (
            "messages[0].content[0]: the time in cache has no effect: this API has no such option",
        )


def test_citations_context_and_detail_go_where_the_api_has_them_and_are_noted_elsewhere() -> None:
    source = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
    document = {"type": "document", "source": source, "citations": True, "context": "A draft."}
    image: dict[str, Any] = {"type": "image", "source": {"type": "url", "url": URL}, "detail": "low"}
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": [document, image]}]}
    [sent] = objects_with(body("anthropic", **asked), "citations")
    assert (sent["citations"], sent["context"]) == ({"enabled": True}, "A draft.")
    [sent] = objects_with(body("openai-chat", **asked), "detail")
    assert sent == {"url": URL, "detail": "low"}
    [sent] = objects_with(body("openai-responses", **asked), "detail")
    assert (sent["type"], sent["detail"]) == ("input_image", "low")
    missing = {
        "anthropic": ["detail"],
        "openai-chat": ["citations", "context"],
        "openai-responses": ["citations", "context"],
        "gemini": ["citations", "context", "detail"],
        "gemini-interactions": ["citations", "context", "detail"],
    }
    for api, names in missing.items():
        noted = [note.split(": ")[1].split(" has no")[0] for note in built(api, **asked).notes]
        assert noted == names


@pytest.mark.parametrize(
    ("source", "media_type"),
    [
        ({"url": "https://www.youtube.com/watch?v=1"}, None),
        ({"url": "https://example.org/a.webp?x=1"}, "image/webp"),
        ({"url": "https://example.org/a.webp", "media_type": "image/gif"}, "image/gif"),
        ({"url": "https://example.org/video", "media_type": "video/mp4"}, "video/mp4"),
    ],
)
def test_gemini_gets_the_media_type_of_a_url_only_if_it_is_known(source: Any, media_type: str | None) -> None:
    asked: dict[str, Any] = {
        "messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", **source}}]}]
    }
    [sent] = objects_with(body("gemini", **asked), "fileUri")
    assert sent == {"fileUri": source["url"], **({"mimeType": media_type} if media_type else {})}
    [sent] = objects_with(body("gemini-interactions", **asked), "uri")
    assert sent == {"type": "image", "uri": source["url"], **({"mime_type": media_type} if media_type else {})}


@pytest.mark.parametrize(
    ("display", "expected"),
    [("summarized", (True, "auto", "auto", "summarized")), ("omitted", (False, "none", None, "omitted"))],
)
def test_thinking_is_shown_or_hidden_in_each_apis_way(display: str, expected: tuple[Any, ...]) -> None:
    asked: dict[str, Any] = {"thinking": {"display": display}}
    assert (
        body("gemini", **asked)["generationConfig"]["thinkingConfig"]["includeThoughts"],
        body("gemini-interactions", **asked)["generation_config"]["thinking_summaries"],
        body("openai-responses", **asked)["reasoning"].get("summary"),
        body("anthropic", **asked)["thinking"]["display"],
    ) == expected
    assert built("openai-chat", **asked).notes == ("thinking.display has no effect: this API has no such option",)


@pytest.mark.parametrize(
    ("model", "thinking", "noted"),
    [
        ("claude-opus-4-8", {"effort": "low"}, True),
        ("claude-opus-4-8", {"effort": "low", "display": "summarized"}, False),
        ("claude-opus-4-8", {"enabled": False}, False),
        ("claude-opus-4-6", {"effort": "low"}, False),
    ],
)
def test_a_note_says_that_a_model_thinks_without_showing_it(model: str, thinking: Any, noted: bool) -> None:
    notes = built("anthropic", model=model, thinking=thinking).notes
    assert any("thinking.display: this model sends its thinking without text" in note for note in notes) == noted


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


@pytest.mark.parametrize(
    ("messages", "roles"),
    [
        ([("user", "a"), ("system", "s")], ["user", "system"]),
        ([("user", "a"), ("system", "s"), ("assistant", "b"), ("user", "c")], ["user", "system", "assistant", "user"]),
        ([("user", "a"), ("system", "s"), ("system", "t")], ["user", "system"]),
        ([("user", "a"), ("assistant", "b"), ("system", "s"), ("user", "c")], ["user", "assistant", "user"]),
        ([("user", "a"), ("system", "s"), ("user", "c")], ["user"]),
        ([("system", "s"), ("user", "a")], ["user"]),
    ],
)
def test_system_text_stays_in_the_middle_where_the_model_takes_it(messages: list[Any], roles: list[str]) -> None:
    asked: dict[str, Any] = {"messages": [said(*message) for message in messages]}
    sent = body("anthropic", model="claude-opus-4-8", **asked)
    assert [message["role"] for message in sent["messages"]] == roles
    assert ("system" in sent) == ("system" not in roles)
    older = body("anthropic", model="claude-opus-4-6", **asked)
    assert "system" not in [message["role"] for message in older["messages"]]
    assert [block["text"] for block in older["system"]] == [text for role, text in messages if role == "system"]


PREFILL: dict[str, Any] = {"mode": "prefill", "participant": "Claude"}


@pytest.mark.parametrize(
    ("fields", "note"),
    [
        ({"thinking": {"effort": "high"}}, "thinking.effort has no effect in mode prefill"),
        ({"system": [{"type": "text", "text": "s", "cache": True}]}, "system: marks for the cache have no effect"),
        ({"tools": [{"name": "f", "extra": {"anthropic": {"x": 1}}}]}, "tools[0]: extra has no effect in mode prefill"),
        ({"part": {"type": "text", "text": "x", "cache": True}}, "marks for the cache have no effect"),
        ({"part": {"type": "text", "text": "x", "opaque": {"citations": "[]"}}}, "citations cannot be written"),
        ({"part": {"type": "thinking", "text": "Hm", "signature": "s"}}, "the signature of thinking was left out"),
        ({"part": {"type": "thinking", "opaque": {"redacted": "x"}}}, "thinking without text"),
        ({"part": {"type": "text", "text": "x", "extra": {"gemini": {"a": 1}}}}, "extra has no effect"),
    ],
)
def test_prefill_names_what_a_text_cannot_hold(fields: dict[str, Any], note: str) -> None:
    part = fields.pop("part", {"type": "text", "text": "x"})
    parts = [part] if part["type"] == "text" else [part, {"type": "text", "text": "x"}]
    messages = [said("user", "Hi"), {"role": "assistant", "content": parts}, said("user", "Go on")]
    notes = built("anthropic", **PREFILL, **fields, messages=messages).notes
    assert [one for one in notes if note in one], notes
    if "part" not in fields:
        plain = built(
            "anthropic", **PREFILL, messages=[said("user", "Hi"), said("assistant", "x"), said("user", "Go on")]
        )
        assert plain.notes == ()


def test_thinking_without_a_signature_may_be_an_error_that_names_its_message() -> None:
    thinking = {"type": "thinking", "text": "Hm."}
    messages = [said("user", "Hi"), {"role": "assistant", "content": [thinking, {"type": "text", "text": "x"}]}]
    messages.append(said("user", "Go on"))
    for api in APIS:
        with pytest.raises(RequestInvalid, match=r"messages\[1\]: thinking without a signature of this provider"):
            built(api, messages=messages, unsigned_thinking="error")
        assert any("was left out" in note for note in built(api, messages=messages).notes)
