"""Requests to the Messages API: the whole body, and what becomes of each field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.unit.providers.request_builder import HI, WEATHER, RequestBuilder
from tokenbus.events.requests import (
    Base64Source,
    DocumentPart,
    ExtraPart,
    Generate,
    ImagePart,
    Message,
    OutputSchema,
    TextPart,
    Thinking,
    ThinkingPart,
    Tool,
    ToolCallPart,
    ToolChoice,
    ToolResultPart,
    UrlSource,
)
from tokenbus.providers.anthropic import provider

EPHEMERAL = {"type": "ephemeral"}
REQUESTS = RequestBuilder(provider, model="claude")
build, body, refused = REQUESTS.build, REQUESTS.body, REQUESTS.refused


def content(*parts: Any, role: Any = "assistant") -> Any:
    """The blocks of one message with these parts."""
    return body(Message(role=role, content=list(parts)))["messages"][0]["content"]


def test_the_smallest_request() -> None:
    built = build(Generate(provider="p", model="claude", messages=[HI]))
    assert built.call.path == "/v1/messages"
    assert built.call.headers == {"content-type": "application/json", "anthropic-version": "2023-06-01"}
    assert msgspec.json.decode(built.call.body) == {
        "model": "claude",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        "stream": True,
        "max_tokens": 8192,
    }
    assert built.notes == ()


def test_a_request_with_everything() -> None:
    user = Message(
        role="user",
        content=[
            TextPart(text="Look:", cache=True),
            ImagePart(source=Base64Source(media_type="image/png", data="AAAA")),
            ImagePart(source=UrlSource(url="https://x/y.png"), cache=True),
            DocumentPart(source=Base64Source(media_type="application/pdf", data="BBBB"), title="Paper"),
            DocumentPart(source=Base64Source(media_type="text/plain", data="aGk=")),
        ],
    )
    history = [
        Message(
            role="assistant",
            content=[
                ThinkingPart(text="Hm", signature="sig"),
                ThinkingPart(opaque={"redacted": "xyz"}),
                TextPart(text="Wait.", opaque={"citations": '[{"url":"u"}]'}),
                ExtraPart(name="anthropic.server_tool_use", json='{"type":"server_tool_use","id":"s"}'),
                ToolCallPart(
                    tool_id="t", tool_name="weather", arguments='{"city": "Bonn"}', opaque={"fields": '{"caller":{}}'}
                ),
            ],
        ),
        Message(role="tool", content=[ToolResultPart(tool_id="t", content="Rain", is_error=True, cache=True)]),
    ]
    assert body(
        Message(role="system", content="Be kind."),
        user,
        history=history,
        system=[TextPart(text="Be brief.", cache=True)],
        tools=[WEATHER, Tool(name="now")],
        tool_choice=ToolChoice(name="weather"),
        max_tokens=9000,
        temperature=0.5,
        top_p=0.9,
        stop=["END"],
        thinking=Thinking(budget_tokens=2000),
        stream=False,
        metadata={"mine": 1},
        extra={
            "top_k": 5,
            "output_config": {"format": {"type": "json_schema", "schema": {}}},
            "tools": [{"type": "web_search_20250305"}],
        },
    ) == {
        "model": "claude",
        "stream": False,
        "max_tokens": 9000,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "stop_sequences": ["END"],
        "thinking": {"type": "enabled", "budget_tokens": 2000},
        "output_config": {"format": {"type": "json_schema", "schema": {}}},
        "system": [
            {"type": "text", "text": "Be brief.", "cache_control": EPHEMERAL},
            {"type": "text", "text": "Be kind."},
        ],
        "tools": [
            {"name": "weather", "description": "The weather.", "input_schema": WEATHER.parameters},
            {"name": "now", "input_schema": {"type": "object", "properties": {}}},
            {"type": "web_search_20250305"},
        ],
        "tool_choice": {"type": "tool", "name": "weather"},
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "Look:", "cache_control": EPHEMERAL},
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
                    {
                        "type": "image",
                        "source": {"type": "url", "url": "https://x/y.png"},
                        "cache_control": EPHEMERAL,
                    },
                    {
                        "type": "document",
                        "source": {"type": "base64", "media_type": "application/pdf", "data": "BBBB"},
                        "title": "Paper",
                    },
                    {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "hi"}},
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm", "signature": "sig"},
                    {"type": "redacted_thinking", "data": "xyz"},
                    {"type": "text", "text": "Wait.", "citations": [{"url": "u"}]},
                    {"type": "server_tool_use", "id": "s"},
                    {"type": "tool_use", "id": "t", "name": "weather", "input": {"city": "Bonn"}, "caller": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t",
                        "content": "Rain",
                        "is_error": True,
                        "cache_control": EPHEMERAL,
                    }
                ],
            },
        ],
    }


def test_neighbours_of_one_role_become_one_message_with_results_first() -> None:
    messages = body(
        HI,
        Message(role="user", content="there"),
        Message(role="assistant", content=[ToolCallPart(tool_id="t", tool_name="f", arguments="")]),
        Message(role="user", content=[TextPart(text="And?"), ToolResultPart(tool_id="t", content="ok")]),
    )["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert [block.get("text") for block in messages[0]["content"]] == ["Hi", "there"]
    assert [block["type"] for block in messages[2]["content"]] == ["tool_result", "text"]


def test_repairs_are_reported() -> None:
    call = Message(role="assistant", content=[ToolCallPart(tool_id="t", tool_name="f", arguments="{}")])
    system = Message(role="system", content="Be brief.")
    built = build(Generate(provider="p", model="m", messages=[HI, call, system]))
    assert built.notes == (
        "messages[1]: the call t of f has no result; an error result was inserted",
        "messages[2]: system text was moved to the front, its only place for this model",
    )
    assert msgspec.json.decode(built.call.body)["system"] == [{"type": "text", "text": "Be brief."}]


def test_a_calls_raw_arguments_are_sent_back_unchanged_if_they_are_an_object() -> None:
    def sent(arguments: str) -> bytes:
        call = ToolCallPart(tool_id="t", tool_name="f", arguments=arguments)
        request = Generate(provider="p", model="m", messages=[Message(role="assistant", content=[call])])
        return build(request).call.body

    assert b'"input":{"a":  1.0}' in sent('{"a":  1.0}')
    assert b'"input":{}' in sent("")
    assert b'"input":{"invalid_arguments":"{\\"a\\": "}' in sent('{"a": ')
    assert b'"input":{"invalid_arguments":"[1]"}' in sent("[1]")


def test_another_providers_ids_are_adapted_in_call_and_result() -> None:
    odd = "functions.f:0"
    messages = body(
        Message(role="assistant", content=[ToolCallPart(tool_id=odd, tool_name="f", arguments="{}")]),
        Message(role="tool", content=[ToolResultPart(tool_id=odd, content="ok")]),
    )["messages"]
    fitted = messages[0]["content"][0]["id"]
    assert fitted.startswith("functions_f_0_")
    assert fitted == messages[1]["content"][0]["tool_use_id"]


def test_parts_that_this_provider_cannot_use_are_left_out() -> None:
    foreign = ExtraPart(name="gemini.executable_code", json="{}")
    thought = ThinkingPart(opaque={"thought_signature": "x"})
    assert content(thought, TextPart(text=" \n"), foreign, TextPart(text="a")) == [{"type": "text", "text": "a"}]


def test_a_result_may_hold_text_and_images() -> None:
    image = ImagePart(source=UrlSource(url="u"))
    call = Message(role="assistant", content=[ToolCallPart(tool_id="t", tool_name="f", arguments="{}")])
    result = ToolResultPart(tool_id="t", content=[TextPart(text="a"), image])
    blocks = body(call, Message(role="tool", content=[result]))["messages"][1]["content"][0]["content"]
    assert blocks == [{"type": "text", "text": "a"}, {"type": "image", "source": {"type": "url", "url": "u"}}]


@pytest.mark.parametrize(
    ("thinking", "max_tokens", "sent"),
    [
        (
            Thinking(budget_tokens=5000),
            None,
            {"max_tokens": 13192, "thinking": {"type": "enabled", "budget_tokens": 5000}},
        ),
        (Thinking(), None, {"max_tokens": 8192, "thinking": {"type": "adaptive"}}),
        (
            Thinking(effort="minimal"),
            7,
            {"max_tokens": 7, "thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}},
        ),
        (
            Thinking(effort="high", budget_tokens=1024),
            2000,
            {
                "max_tokens": 2000,
                "thinking": {"type": "enabled", "budget_tokens": 1024},
                "output_config": {"effort": "high"},
            },
        ),
        (Thinking(enabled=False, budget_tokens=5), None, {"max_tokens": 8192, "thinking": {"type": "disabled"}}),
    ],
)
def test_thinking_is_asked_for_by_budget_or_by_effort(
    thinking: Thinking, max_tokens: int | None, sent: dict[str, Any]
) -> None:
    request_body = body(thinking=thinking, max_tokens=max_tokens)
    assert {
        name: request_body[name] for name in ("max_tokens", "thinking", "output_config") if name in request_body
    } == sent


@pytest.mark.parametrize(
    ("effort", "max_tokens", "budget"), [("high", None, 24_576), ("high", 10_000, 5000), ("low", 1500, 1024)]
)
def test_a_model_that_accepts_only_budgets_receives_one_for_the_effort(
    effort: Any, max_tokens: Any, budget: int
) -> None:
    sent = body(thinking=Thinking(effort=effort), max_tokens=max_tokens, model="claude-sonnet-4-5-20250929")
    assert sent["thinking"] == {"type": "enabled", "budget_tokens": budget}
    assert "output_config" not in sent


def test_the_schema_of_the_answer_is_sent_beside_the_effort() -> None:
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "additionalProperties": False}
    sent = body(output_schema=OutputSchema(schema=city, name="city", strict=True), thinking=Thinking(effort="low"))
    assert sent["output_config"] == {"effort": "low", "format": {"type": "json_schema", "schema": city}}
    assert body(output_schema=OutputSchema(schema=city))["output_config"] == {
        "format": {"type": "json_schema", "schema": city}
    }


@pytest.mark.parametrize(
    ("choice", "sent"),
    [("auto", {"type": "auto"}), ("any", {"type": "any"}), ("none", {"type": "none"}), (None, None)],
)
def test_the_choice_of_tools_is_translated_and_needs_tools(choice: Any, sent: Any) -> None:
    assert body(tools=[WEATHER], tool_choice=choice).get("tool_choice") == sent
    if choice != "any":
        assert "tool_choice" not in body(tool_choice=choice)


def test_quirks_decide_the_limits() -> None:
    request = Generate(provider="p", model="m", messages=[HI], stop=["a", "b"])
    assert msgspec.json.decode(build(request, default_max_tokens=99).call.body)["max_tokens"] == 99
    assert msgspec.json.decode(build(request, max_stop_strings=1).call.body)["stop_sequences"] == ["a"]


def test_what_this_provider_cannot_take_is_refused_with_its_place() -> None:
    pdf = DocumentPart(source=Base64Source(media_type="text/plain", data="//"))
    cited = TextPart(text="a", opaque={"citations": "["})
    fields = ToolCallPart(tool_id="t", tool_name="f", arguments="", opaque={"fields": "[]"})
    assert refused(tool_choice="any") == "tool_choice"
    assert refused(max_tokens=100, thinking=Thinking(budget_tokens=100)) == "thinking.budget_tokens"
    assert refused(extra={"stream": True}) == "extra.stream"
    assert refused(extra={"messages": []}) == "extra.messages"
    assert refused(Message(role="system", content="alone")) == "messages"
    assert refused(Message(role="user", content=[pdf])) == "messages[0].content[0].source.data"
    assert refused(Message(role="assistant", content=[cited])) == "messages[0].content[0].opaque.citations"
    assert refused(Message(role="assistant", content=[fields])) == "messages[0].content[0].opaque.fields"


def test_an_error_without_a_message_gets_one_because_the_api_rejects_it_empty() -> None:
    call = Message(role="assistant", content=[ToolCallPart(tool_id="t", tool_name="f", arguments="{}")])
    for result in (
        ToolResultPart(tool_id="t", content="", is_error=True),
        ToolResultPart(tool_id="t", content=[], is_error=True),
        ToolResultPart(tool_id="t", content=[TextPart(text=" ")], is_error=True),
    ):
        sent = body(HI, call, Message(role="tool", content=[result]))["messages"][-1]["content"][0]
        assert sent["content"] == "The tool failed without a message."
    fine = Message(role="tool", content=[ToolResultPart(tool_id="t", content="")])
    assert not body(HI, call, fine)["messages"][-1]["content"][0]["content"]


def test_names_of_betas_go_into_the_header_or_for_bedrock_into_the_body() -> None:
    request = Generate(provider="p", model="claude", messages=[HI], extra={"anthropic_beta": ["a-1", "b-2", "a-1"]})
    header, inside = build(request), build(request, betas_in_body=True)
    assert header.call.headers["anthropic-beta"] == "a-1,b-2"
    assert "anthropic_beta" not in msgspec.json.decode(header.call.body)
    assert "anthropic-beta" not in inside.call.headers
    assert msgspec.json.decode(inside.call.body)["anthropic_beta"] == ["a-1", "b-2"]


@pytest.mark.parametrize(
    ("model", "thinking", "expected"),
    [
        ("claude-opus-5", Thinking(enabled=False), {"thinking": {"type": "disabled"}}),
        ("claude-opus-5-5", Thinking(enabled=False), {"output_config": {"effort": "low"}}),
        ("claude-fable-5-1", Thinking(effort="none"), {"output_config": {"effort": "low"}}),
        ("claude-sonnet-5-5", Thinking(enabled=False), {"thinking": {"type": "between_tools"}}),
        (
            "claude-opus-5-5",
            Thinking(budget_tokens=20_000),
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}},
        ),
    ],
    ids=str,
)
def test_thinking_is_turned_off_or_bounded_as_the_model_takes_it(
    model: str, thinking: Thinking, expected: dict[str, Any]
) -> None:
    built = build(Generate(provider="p", model=model, messages=[HI], thinking=thinking))
    sent = msgspec.json.decode(built.call.body)
    assert {name: sent[name] for name in ("thinking", "output_config") if name in sent} == expected
    noted = any("cannot turn it off" in note for note in built.notes)
    assert noted == (not thinking.wanted and "thinking" not in expected)
