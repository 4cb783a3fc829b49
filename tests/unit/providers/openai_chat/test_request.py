"""Requests to Chat Completions: the whole body, what becomes of each field, and what a vendor's quirks change."""

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
from tokenbus.providers.openai_chat import provider

REQUESTS = RequestBuilder(provider, model="gpt")
build, body, refused = REQUESTS.build, REQUESTS.body, REQUESTS.refused


def test_the_smallest_request() -> None:
    built = build(Generate(provider="p", model="gpt", messages=[HI]))
    assert built.call.path == "/chat/completions"
    assert built.call.headers == {"content-type": "application/json"}
    assert msgspec.json.decode(built.call.body) == {
        "model": "gpt",
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_a_request_with_everything() -> None:
    user = Message(
        role="user",
        content=[
            TextPart(text="Look:", cache=True),
            ImagePart(source=Base64Source(media_type="image/png", data="AAAA")),
            ImagePart(source=UrlSource(url="https://x/y.png")),
            DocumentPart(source=Base64Source(media_type="application/pdf", data="BBBB"), title="a.pdf"),
            ExtraPart(name="input_audio", json='{"type":"input_audio"}'),
        ],
        participant="Ann",
    )
    history = [
        Message(
            role="assistant",
            content=[
                ThinkingPart(text="Hm", opaque={"reasoning_details": '[{"type":"reasoning.text","signature":"s"}]'}),
                TextPart(text="Wait"),
                TextPart(text="."),
                ToolCallPart(
                    tool_id="t",
                    tool_name="weather",
                    arguments='{"city":  "Bonn"}',
                    opaque={"extra_content": '{"google":{}}'},
                ),
                ToolCallPart(tool_id="u", tool_name="now", arguments=""),
            ],
        ),
        Message(
            role="tool",
            content=[
                ToolResultPart(tool_id="u", content=[TextPart(text="noon"), ImagePart(source=UrlSource(url="i"))]),
                ToolResultPart(tool_id="t", content="Rain", is_error=True),
            ],
        ),
    ]
    assert body(
        Message(role="system", content="Be kind."),
        user,
        history=history,
        system=[TextPart(text="Be brief.", cache=True), TextPart(text="Be exact.")],
        tools=[WEATHER, Tool(name="now")],
        tool_choice=ToolChoice(name="weather"),
        max_tokens=900,
        temperature=0.5,
        top_p=0.9,
        stop=["END"],
        thinking=Thinking(effort="low", budget_tokens=5),
        stream=False,
        metadata={"mine": 1},
        extra={"seed": 5, "response_format": {"type": "json_object"}},
    ) == {
        "model": "gpt",
        "stream": False,
        "max_completion_tokens": 900,
        "temperature": 0.5,
        "top_p": 0.9,
        "stop": ["END"],
        "reasoning_effort": "low",
        "seed": 5,
        "response_format": {"type": "json_object"},
        "tools": [
            {
                "type": "function",
                "function": {"name": "weather", "description": "The weather.", "parameters": WEATHER.parameters},
            },
            {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
        ],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "messages": [
            {"role": "system", "content": "Be brief.\n\nBe exact."},
            {"role": "system", "content": "Be kind."},
            {
                "role": "user",
                "name": "Ann",
                "content": [
                    {"type": "text", "text": "Look:"},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                    {"type": "image_url", "image_url": {"url": "https://x/y.png"}},
                    {
                        "type": "file",
                        "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,BBBB"},
                    },
                    {"type": "input_audio"},
                ],
            },
            {
                "role": "assistant",
                "content": "Wait.",
                "reasoning_details": [{"type": "reasoning.text", "signature": "s"}],
                "tool_calls": [
                    {
                        "id": "t",
                        "type": "function",
                        "function": {"name": "weather", "arguments": '{"city":  "Bonn"}'},
                        "extra_content": {"google": {}},
                    },
                    {"id": "u", "type": "function", "function": {"name": "now", "arguments": "{}"}},
                ],
            },
            {"role": "tool", "tool_call_id": "t", "content": "Rain"},
            {"role": "tool", "tool_call_id": "u", "content": "noon"},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "Images of the result of u:"},
                    {"type": "image_url", "image_url": {"url": "i"}},
                ],
            },
        ],
    }


def test_a_vendors_quirks_change_names_and_leave_out_what_it_refuses() -> None:
    quirks = {"max_tokens_field": "max_tokens", "stream_usage": False, "system_role": "developer"}
    sent = body(system="Be brief.", max_tokens=5, quirks=quirks)
    assert sent["max_tokens"] == 5
    assert "stream_options" not in sent
    assert sent["messages"][0] == {"role": "developer", "content": "Be brief."}


def test_thinking_is_sent_back_only_to_vendors_that_want_it() -> None:
    turn = [Message(role="assistant", content=[ThinkingPart(text="Hm"), TextPart(text="a")])]
    assert body(history=turn)["messages"][1] == {"role": "assistant", "content": "a"}
    back = body(history=turn, quirks={"reasoning_back": "reasoning_content"})["messages"][1]
    assert back == {"role": "assistant", "content": "a", "reasoning_content": "Hm"}
    inside = body(history=turn, quirks={"reasoning_back": "content"})["messages"][1]
    thought = {"type": "thinking", "thinking": [{"type": "text", "text": "Hm"}]}
    assert inside == {"role": "assistant", "content": [thought, {"type": "text", "text": "a"}]}


def test_cache_marks_are_sent_only_to_a_vendor_that_takes_them() -> None:
    marked = Message(role="user", content=[TextPart(text="a", cache=True)])
    system = [TextPart(text="s", cache=True)]
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    sent = body(marked, system=system, quirks={"cache_marks": True})["messages"]
    assert sent == [
        {"role": "system", "content": [{**part, "text": "s"}]},
        {"role": "user", "content": [part]},
    ]
    assert body(marked)["messages"] == [{"role": "user", "content": "a"}]


def test_a_message_with_nothing_for_this_provider_is_left_out() -> None:
    thinking = Message(role="assistant", content=[ThinkingPart(text="Hm", signature="sig")])
    foreign = Message(role="user", content=[ExtraPart(name="anthropic.x", json="{}")])
    assert body(HI, thinking, foreign)["messages"] == [{"role": "user", "content": "Hi"}]


def test_a_message_of_calls_alone_has_null_for_its_text() -> None:
    call = ToolCallPart(tool_id="t", tool_name="f", arguments="{not json")
    sent = body(Message(role="assistant", content=[call]))["messages"][0]
    assert sent["content"] is None
    assert sent["tool_calls"][0]["function"]["arguments"] == "{not json"


def test_long_ids_are_made_to_fit_for_call_and_result_alike() -> None:
    ids = ["chatcmpl-tool-" + "a" * 32, "chatcmpl-tool-" + "a" * 31 + "b"]
    calls = Message(role="assistant", content=[ToolCallPart(tool_id=i, tool_name="f", arguments="{}") for i in ids])
    results = Message(role="tool", content=[ToolResultPart(tool_id=i, content="ok") for i in ids])
    messages = body(calls, results)["messages"]
    sent = [call["id"] for call in messages[0]["tool_calls"]]
    assert sent == [message["tool_call_id"] for message in messages[1:]]
    assert len(set(sent)) == 2
    assert all(len(tool_id) == 40 for tool_id in sent)


@pytest.mark.parametrize(("participant", "name"), [("Ann", "Ann"), ("Ann Lee", "Ann_Lee"), ("a" * 65, "a" * 64)])
def test_a_participants_name_is_made_to_fit(participant: str, name: str) -> None:
    assert body(Message(role="user", content="Hi", participant=participant))["messages"][0].get("name") == name


@pytest.mark.parametrize(
    ("thinking", "effort"),
    [
        (Thinking(effort="high"), "high"),
        (Thinking(), None),
        (Thinking(enabled=False, effort="high"), "none"),
        (Thinking(budget_tokens=4096), "low"),
        (Thinking(budget_tokens=4097), "medium"),
        (Thinking(budget_tokens=50_000), "high"),
        (Thinking(budget_tokens=50_000, effort="low"), "low"),
    ],
)
def test_thinking_is_asked_for_by_effort(thinking: Thinking, effort: str | None) -> None:
    assert body(thinking=thinking).get("reasoning_effort") == effort


TYPED: dict[str, Any] = {
    "thinking_on": {"thinking": {"type": "enabled"}},
    "thinking_off": {"thinking": {"type": "disabled"}},
    "effort_field": "",
}
NESTED: dict[str, Any] = {
    "thinking_on": {"reasoning": {"enabled": True}},
    "thinking_off": {"reasoning": {"enabled": False}},
    "effort_field": "reasoning.effort",
    "budget_field": "reasoning.max_tokens",
}


@pytest.mark.parametrize(
    ("quirks", "thinking", "sent"),
    [
        (TYPED, Thinking(effort="high", budget_tokens=5), {"thinking": {"type": "enabled"}}),
        (TYPED, Thinking(enabled=False), {"thinking": {"type": "disabled"}}),
        (NESTED, Thinking(effort="high"), {"reasoning": {"enabled": True, "effort": "high"}}),
        (NESTED, Thinking(budget_tokens=5), {"reasoning": {"enabled": True, "max_tokens": 5}}),
        (NESTED, Thinking(enabled=False, effort="low"), {"reasoning": {"enabled": False}}),
        ({"budget_field": "thinking_budget"}, Thinking(budget_tokens=5), {"thinking_budget": 5}),
    ],
)
def test_how_a_vendor_is_asked_for_thinking_is_data(
    quirks: dict[str, Any], thinking: Thinking, sent: dict[str, Any]
) -> None:
    request_body = body(quirks=quirks, thinking=thinking)
    usual = body(quirks=quirks)
    assert {name: value for name, value in request_body.items() if name not in usual} == sent


@pytest.mark.parametrize(("strict", "expected"), [(None, {}), (True, {"strict": True}), (False, {"strict": False})])
def test_the_schema_of_the_answer_is_named(strict: bool | None, expected: dict[str, Any]) -> None:
    city = {"type": "object", "properties": {"city": {"type": "string"}}}
    sent = body(output_schema=OutputSchema(schema=city, name="city", strict=strict))
    assert sent["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "city", "schema": city, **expected},
    }


@pytest.mark.parametrize(("choice", "sent"), [("auto", "auto"), ("any", "required"), ("none", "none"), (None, None)])
def test_the_choice_of_tools_is_translated_and_needs_tools(choice: Any, sent: Any) -> None:
    assert body(tools=[WEATHER], tool_choice=choice).get("tool_choice") == sent
    if choice != "any":
        assert "tool_choice" not in body(tool_choice=choice)


def test_what_this_provider_cannot_take_is_refused_with_its_place() -> None:
    details = ThinkingPart(opaque={"reasoning_details": "{}"})
    text = TextPart(text="Yes")
    extra = ToolCallPart(tool_id="t", tool_name="f", arguments="", opaque={"extra_content": "{"})
    audio = ExtraPart(name="input_audio", json="{")
    assert refused(mode="prefill") == "mode"
    assert refused(tool_choice=ToolChoice(name="f")) == "tool_choice"
    assert refused(extra={"stream": True}) == "extra.stream"
    assert refused(extra={"messages": []}) == "extra.messages"
    assert (
        refused(Message(role="assistant", content=[details, text])) == "messages[0].content[0].opaque.reasoning_details"
    )
    assert refused(Message(role="assistant", content=[extra])) == "messages[0].content[0].opaque.extra_content"
    assert refused(Message(role="user", content=[audio])) == "messages[0].content[0]"


def test_a_provider_gets_as_many_stop_strings_as_it_accepts() -> None:
    assert body(stop=list("abcde"))["stop"] == list("abcd")
    assert body(stop=list("abcde"), quirks={"max_stop_strings": 5})["stop"] == list("abcde")


def test_the_models_own_speech_goes_back_by_its_id_and_to_others_as_its_transcript() -> None:
    def assistant(provider_name: str) -> Any:
        opaque = {"audio": "audio_1", "api": "openai-chat", "provider": provider_name}
        said = Message(role="assistant", content=[TextPart(text="Hello", opaque=opaque)])
        return body(HI, said, HI)["messages"][1]

    assert assistant("p") == {"role": "assistant", "content": None, "audio": {"id": "audio_1"}}
    assert assistant("another") == {"role": "assistant", "content": "Hello"}
