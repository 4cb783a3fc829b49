"""Requests to Gemini: the whole body, and what becomes of each field and part."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.unit.providers.request_builder import HI, WEATHER, RequestBuilder
from tokenbus.errors import RequestInvalid
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
from tokenbus.providers.gemini import provider

REQUESTS = RequestBuilder(provider, model="gemini-3-pro")
build, body, refused = REQUESTS.build, REQUESTS.body, REQUESTS.refused


def parts_of(*parts: Any, **fields: Any) -> list[Any]:
    """The parts that an assistant's message becomes."""
    contents = body(HI, history=[Message(role="assistant", content=list(parts))], **fields)["contents"]
    return contents[1]["parts"] if len(contents) > 1 else []


def call(tool_id: str = "t", arguments: str = "{}", **opaque: str) -> ToolCallPart:
    return ToolCallPart(tool_id=tool_id, tool_name="f", arguments=arguments, opaque=opaque or None)


def test_the_smallest_request() -> None:
    built = build(Generate(provider="p", model="gemini-3-pro", messages=[HI]))
    assert (built.call.path, built.call.query) == (
        "/models/gemini-3-pro:streamGenerateContent",
        {"alt": "sse"},
    )
    assert built.call.headers == {"content-type": "application/json"}
    assert msgspec.json.decode(built.call.body) == {"contents": [{"role": "user", "parts": [{"text": "Hi"}]}]}


@pytest.mark.parametrize(
    ("model", "path"),
    [
        ("gemini", "/models/gemini:generateContent"),
        ("models/gemini", "/models/gemini:generateContent"),
        ("tunedModels/mine", "/tunedModels/mine:generateContent"),
        (" gemini ", "/models/gemini:generateContent"),
        ("publishers/google/models/gemini", "/publishers/google/models/gemini:generateContent"),
        ("a b?c:d", "/models/a%20b%3Fc%3Ad:generateContent"),
    ],
)
def test_the_model_is_part_of_the_path(model: str, path: str) -> None:
    built = build(Generate(provider="p", model=model, messages=[HI], stream=False))
    assert (built.call.path, built.call.query) == (path, {})


@pytest.mark.parametrize(
    "model",
    [
        *("../../../x", "..", "models/..", "models/../../x", "tunedModels/../x", "a/b", "/x", "x/", "//host/x"),
        *("a%2fb", "..%2f..%2fx", "%2e%2e", "a\\..\\b", "x\r\nhost: y", "models/", "https://host/models/x"),
        *("publishers/../models/x", "publishers/a/b/models/x", "upload/models/x"),
    ],
)
def test_a_model_that_would_choose_the_path_is_refused(model: str) -> None:
    with pytest.raises(RequestInvalid) as refused:
        build(Generate(provider="p", model=model, messages=[HI]))
    assert refused.value.where == "model"


def test_extra_cannot_name_another_model() -> None:
    with pytest.raises(RequestInvalid) as refused:
        build(Generate(provider="p", model="gemini", messages=[HI], extra={"model": "dearer"}))
    assert refused.value.where == "extra.model"


def test_a_request_with_everything() -> None:
    user = Message(
        role="user",
        content=[
            TextPart(text="Look:", cache=True),
            ImagePart(source=Base64Source(media_type="image/png", data="AAAA")),
            ImagePart(source=UrlSource(url="https://x/y.PNG?z=1")),
            DocumentPart(source=Base64Source(media_type="application/pdf", data="BBBB"), title="a.pdf"),
            DocumentPart(source=UrlSource(url="https://x/files/b")),
            ExtraPart(name="video", json='{"fileData":{"fileUri":"v"}}'),
        ],
        participant="Ann",
    )
    history = [
        Message(
            role="assistant",
            content=[
                ThinkingPart(text="Hm", opaque={"thought_signature": "s0"}),
                ThinkingPart(text="unsigned"),
                TextPart(text="Wait", opaque={"thought_signature": "s1"}),
                ExtraPart(name="gemini.executableCode", json='{"executableCode":{"code":"1"},"thoughtSignature":"s2"}'),
                ToolCallPart(
                    tool_id="id1",
                    tool_name="weather",
                    arguments='{"city":  "Bonn"}',
                    opaque={"item_id": "id1", "thought_signature": "s3"},
                ),
                ToolCallPart(tool_id="call_1", tool_name="now", arguments=""),
            ],
        ),
        Message(
            role="tool",
            content=[
                ToolResultPart(tool_id="call_1", content=[TextPart(text="noon"), ImagePart(source=UrlSource(url="i"))]),
                ToolResultPart(tool_id="id1", content="Rain", is_error=True),
            ],
        ),
        Message(role="user", content="And?"),
    ]
    assert body(
        user,
        history=history,
        system=[TextPart(text="Be brief.", cache=True), TextPart(text="Be exact.")],
        tools=[WEATHER, Tool(name="now")],
        tool_choice=ToolChoice(name="weather"),
        max_tokens=900,
        temperature=0.5,
        top_p=0.9,
        stop=["END"],
        thinking=Thinking(budget_tokens=1000, effort="low"),
        metadata={"mine": 1},
        extra={
            "tools": [{"googleSearch": {}}],
            "generationConfig": {"responseMimeType": "application/json", "responseJsonSchema": {"type": "object"}},
            "safetySettings": [],
        },
    ) == {
        "systemInstruction": {"parts": [{"text": "Be brief."}, {"text": "Be exact."}]},
        "generationConfig": {
            "maxOutputTokens": 900,
            "temperature": 0.5,
            "topP": 0.9,
            "stopSequences": ["END"],
            "thinkingConfig": {"includeThoughts": True, "thinkingBudget": 1000},
            "responseMimeType": "application/json",
            "responseJsonSchema": {"type": "object"},
        },
        "safetySettings": [],
        "tools": [
            {
                "functionDeclarations": [
                    {
                        "name": "weather",
                        "description": "The weather.",
                        "parametersJsonSchema": WEATHER.parameters,
                    },
                    {"name": "now"},
                ]
            },
            {"googleSearch": {}},
        ],
        "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["weather"]}},
        "contents": [
            {
                "role": "user",
                "parts": [
                    {"text": "Look:"},
                    {"inlineData": {"mimeType": "image/png", "data": "AAAA"}},
                    {"fileData": {"mimeType": "image/png", "fileUri": "https://x/y.PNG?z=1"}},
                    {"inlineData": {"mimeType": "application/pdf", "data": "BBBB"}},
                    {"fileData": {"fileUri": "https://x/files/b"}},
                    {"fileData": {"fileUri": "v"}},
                ],
            },
            {
                "role": "model",
                "parts": [
                    {"text": "Hm", "thought": True, "thoughtSignature": "s0"},
                    {"text": "Wait", "thoughtSignature": "s1"},
                    {"executableCode": {"code": "1"}, "thoughtSignature": "s2"},
                    {
                        "functionCall": {"id": "id1", "name": "weather", "args": {"city": "Bonn"}},
                        "thoughtSignature": "s3",
                    },
                    {"functionCall": {"name": "now", "args": {}}},
                ],
            },
            {
                "role": "user",
                "parts": [
                    {"functionResponse": {"id": "id1", "name": "weather", "response": {"error": "Rain"}}},
                    {"functionResponse": {"name": "now", "response": {"output": "noon"}}},
                    {"text": "Images of the result of now:"},
                    {"fileData": {"fileUri": "i"}},
                    {"text": "And?"},
                ],
            },
        ],
    }


def test_a_call_of_another_model_gets_the_marker_if_the_model_requires_signatures() -> None:
    marked = {"functionCall": {"name": "f", "args": {}}, "thoughtSignature": "skip_thought_signature_validator"}
    bare = {"functionCall": {"name": "f", "args": {}}}
    assert parts_of(call("a"), call("b")) == [marked, bare]
    assert parts_of(call("a"), model="models/gemini-2.5-flash") == [bare]
    signed = {**bare, "thoughtSignature": "s"}
    assert parts_of(call("a"), call("b", thought_signature="s")) == [bare, signed]


def test_results_match_their_calls_even_if_ids_repeat() -> None:
    turn = [
        Message(role="assistant", content=[call("call_0", item_id="first")]),
        Message(role="tool", content=[ToolResultPart(tool_id="call_0", content="1")]),
        Message(role="assistant", content=[call("call_0", item_id="second")]),
        Message(role="tool", content=[ToolResultPart(tool_id="call_0", content="2")]),
    ]
    contents = body(HI, history=turn)["contents"]
    sent = [(part["functionResponse"]["id"], part["functionResponse"]["response"]) for part in
            (contents[2]["parts"][0], contents[4]["parts"][0])]  # fmt: skip
    assert sent == [("first", {"output": "1"}), ("second", {"output": "2"})]


@pytest.mark.parametrize("arguments", ["{not json", "[1]"])
def test_arguments_that_are_no_object_are_shown_as_what_they_were(arguments: str) -> None:
    [items] = parts_of(call("a", arguments))
    assert items["functionCall"]["args"] == {"invalid_arguments": arguments}


def test_system_text_is_moved_to_the_front() -> None:
    late = Message(role="system", content="Late.")
    built = build(Generate(provider="p", model="gemini-3-pro", messages=[HI, late], system="Early."))
    decoded = msgspec.json.decode(built.call.body)
    assert decoded["systemInstruction"] == {"parts": [{"text": "Early."}, {"text": "Late."}]}
    assert decoded["contents"] == [{"role": "user", "parts": [{"text": "Hi"}]}]
    assert [note.split(":")[0] for note in built.notes] == ["messages[1]"]


def test_a_provider_item_of_another_api_and_unsigned_thoughts_are_left_out() -> None:
    assert parts_of(ThinkingPart(text="Hm", signature="sig"), ExtraPart(name="anthropic.x", json="{}")) == []


@pytest.mark.parametrize(
    ("thinking", "config"),
    [
        (Thinking(effort="high"), {"includeThoughts": True, "thinkingLevel": "HIGH"}),
        (Thinking(), {"includeThoughts": True}),
        (Thinking(enabled=False, effort="high"), {"thinkingBudget": 0}),
    ],
)
def test_thinking_is_asked_for_by_budget_or_level(thinking: Thinking, config: Any) -> None:
    assert body(thinking=thinking)["generationConfig"] == {"thinkingConfig": config}


def test_an_older_model_gets_a_budget_for_the_effort() -> None:
    sent = body(thinking=Thinking(effort="low"), model="models/gemini-2.5-flash")["generationConfig"]
    assert sent == {"thinkingConfig": {"includeThoughts": True, "thinkingBudget": 4096}}


def test_the_schema_of_the_answer_makes_it_json() -> None:
    city = {"type": "object", "properties": {"city": {"type": "string"}}}
    assert body(output_schema=OutputSchema(schema=city, name="city", strict=True))["generationConfig"] == {
        "responseMimeType": "application/json",
        "responseJsonSchema": city,
    }


@pytest.mark.parametrize(("choice", "mode"), [("auto", "AUTO"), ("any", "ANY"), ("none", "NONE")])
def test_the_choice_of_tools_is_translated_and_needs_tools(choice: Any, mode: str) -> None:
    assert body(tools=[WEATHER], tool_choice=choice)["toolConfig"] == {"functionCallingConfig": {"mode": mode}}
    if choice != "any":
        assert "toolConfig" not in body(tool_choice=choice)


def test_what_this_provider_cannot_take_is_refused_with_its_place() -> None:
    assert refused(tool_choice=ToolChoice(name="f")) == "tool_choice"
    assert refused(extra={"stream": True}) == "extra.stream"
    assert refused(extra={"contents": []}) == "extra.contents"
    assert refused(Message(role="user", content=[ExtraPart(name="x", json="{")])) == "messages[0].content[0]"
    assert refused(Message(role="system", content="Alone.")) == "messages"


def test_a_provider_gets_as_many_stop_strings_as_it_accepts() -> None:
    assert body(stop=list("abcde"))["generationConfig"] == {"stopSequences": list("abcde")}
    assert body(stop=list("aabcdef"))["generationConfig"] == {"stopSequences": list("abcde")}
    assert body(stop=list("ab"), quirks={"max_stop_strings": 1})["generationConfig"] == {"stopSequences": ["a"]}
