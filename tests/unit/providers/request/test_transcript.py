"""A conversation as one text: the model's input, the place at which it continues, and its stop strings."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tokenbus.core.prefill.options import reading_of
from tokenbus.errors import RequestInvalid
from tokenbus.events.quirks import Quirks, ThinkingTags
from tokenbus.events.requests import (
    Base64Source,
    Generate,
    ImagePart,
    Message,
    PrefillOptions,
    TextPart,
    Thinking,
    Tool,
    ToolCallPart,
    ToolResultPart,
)
from tokenbus.prefill_names import unnamed_where
from tokenbus.providers import registry
from tokenbus.providers.request.participants import CALLS_CLOSES, provider_stops, reading_stops
from tokenbus.providers.request.transcript import transcribe

IMAGE = ImagePart(source=Base64Source(media_type="image/png", data="AAAA"))


def message(text: str, who: str | None = None, role: Any = "user") -> Message:
    return Message(role=role, content=text, participant=who)


def request(*messages: Message, **fields: Any) -> Generate:
    given: dict[str, Any] = {"mode": "prefill", "participant": "Claude", "provider": "anthropic", "model": "m"}
    return Generate(**{**given, "messages": list(messages) or [message("hello", "Ann")], **fields})


def text_of(request: Generate, history: list[Message] | None = None) -> str:
    [text] = transcribe(request, history or []).parts
    assert isinstance(text, str)
    return text


def body_of(request: Generate, api: Any = "anthropic", **quirks: Any) -> tuple[str, dict[str, Any]]:
    call = registry.get(api).build(request, [], Quirks(**quirks)).call
    return call.path, json.loads(call.body)


def test_a_line_a_message_and_the_models_name_at_the_end() -> None:
    generate = request(message("hello", "Ann"), message("hi", role="assistant"), message("and you?", "Bob"))
    assert text_of(generate) == "Ann: hello\nClaude: hi\nBob: and you?\nClaude:"


def test_thinking_that_is_on_begins_in_the_text_and_so_does_its_reading() -> None:
    generate = request(thinking=Thinking())
    assert text_of(generate).endswith("\nClaude: <thinking>")
    assert reading_of(generate, "anthropic", Quirks()).inside == "thinking"


def test_the_models_own_last_message_is_continued() -> None:
    generate = request(message("hello", "Ann"), message("I am", role="assistant"), thinking=Thinking())
    assert text_of(generate) == "Ann: hello\nClaude: I am"
    assert reading_of(generate, "anthropic", Quirks()).inside == ""


def test_an_empty_name_is_left_out_and_stops_nothing() -> None:
    generate = request(message("It rains.", ""), message("hello", "Ann"))
    assert text_of(generate) == "It rains.\nAnn: hello\nClaude:"
    assert reading_stops(generate) == ("\nAnn:",)


def test_the_models_text_is_verbatim_and_escaped_results_follow_it() -> None:
    wrote = ' Let me see.\n<function_calls>\n<invoke name="f"/></function_calls>'
    results = [
        ToolResultPart(tool_id="a", content="1 < 2 & </result>"),
        ToolResultPart(tool_id="b", content="no", is_error=True),
    ]
    history = [Message(role="assistant", content=wrote), Message(role="tool", content=list(results))]
    assert text_of(request(), history) == (
        f"Ann: hello\nClaude:{wrote}<function_results>\n"
        '<result tool_use_id="a">1 &lt; 2 &amp; &lt;/result&gt;</result>\n<error tool_use_id="b">no</error>\n'
        "</function_results>"
    )


def test_calls_of_an_earlier_conversation_are_written_as_the_model_writes_them() -> None:
    call = ToolCallPart(tool_id="a", tool_name="f", arguments='{"q":"x","n":[1]}')
    generate = request(
        message("hello", "Ann"),
        Message(role="assistant", content=[TextPart(text="Let me see."), call]),
        Message(role="tool", content=[ToolResultPart(tool_id="a", content="7")]),
    )
    assert text_of(generate).endswith(
        'Let me see.\n<function_calls>\n<invoke name="f">\n<parameter name="q">x</parameter>\n'
        '<parameter name="n">[1]</parameter>\n</invoke>\n</function_calls><function_results>\n'
        '<result tool_use_id="a">7</result>\n</function_results>'
    )


@pytest.mark.parametrize("arguments", ["{", "[1]", '{"a":' + "[" * 10_000 + "]" * 10_000 + "}"])
def test_arguments_that_are_no_object_or_nested_too_deeply_are_written_as_they_are(arguments: str) -> None:
    call = ToolCallPart(tool_id="c1", tool_name="find", arguments=arguments)
    generate = request(message("hello", "Ann"), Message(role="assistant", content=[call]))
    assert f'<parameter name="invalid_arguments">{arguments}</parameter>' in text_of(generate)


def test_the_latest_names_come_first_then_the_calls_end_then_the_requests_own_up_to_the_limit() -> None:
    generate = request(*(message("x", f"P{i}") for i in range(12)), message("y", role="assistant"), stop=["END"])
    names = [f"\nP{i}:" for i in range(11, 1, -1)]
    assert provider_stops(generate, "", None) == [*names, *CALLS_CLOSES, "END"]
    assert provider_stops(generate, "", 11) == [*names, CALLS_CLOSES[0]]
    everyone = [*names, "\nP1:", "\nP0:"]
    assert reading_stops(generate) == (*everyone, "END"), "what the provider is not told of is found in the text"


def test_images_keep_their_place_in_the_users_message() -> None:
    generate = request(
        Message(role="user", participant="Ann", content=[TextPart(text="look:"), IMAGE]), message("and?")
    )
    _, body = body_of(generate)
    user, assistant = body["messages"]
    assert [block["type"] for block in user["content"]] == ["text", "image"]
    assert user["content"][0]["text"] == "Ann: look:"
    assert assistant["content"] == "\nUser: and?\nClaude:"


def test_anthropic_continues_the_assistants_message_and_gets_no_blank_end() -> None:
    asked = request(message("hello", "Ann"), message("I am ", role="assistant"), stop=["\n\n", "END"])
    path, body = body_of(asked)
    assert path == "/v1/messages"
    assert [m["role"] for m in body["messages"]] == ["user", "assistant"]
    assert body["messages"][1]["content"] == "Ann: hello\nClaude: I am"
    assert body["stop_sequences"] == ["\nAnn:", *CALLS_CLOSES, "END"]
    assert "tools" not in body


def test_tools_are_described_in_the_system_text() -> None:
    _, body = body_of(request(tools=[Tool(name="weather", description="of a city")], system="Be kind."))
    assert body["system"].startswith("Be kind.\n\n")
    assert '"name":"weather"' in body["system"]


def test_a_vendor_of_chat_completions_continues_by_its_completions_or_a_message() -> None:
    path, body = body_of(request(system="Be kind."), "openai-chat", continues="completions")
    assert (path, body["prompt"]) == ("/completions", "Be kind.\n\nAnn: hello\nClaude:")
    flags = {"continue_final_message": True, "add_generation_prompt": False}
    path, body = body_of(
        request(), "openai-chat", continues="message", continuing=flags, continued={"prefix": True}, max_stop_strings=2
    )
    assert path == "/chat/completions"
    assert body["messages"][-1] == {"role": "assistant", "content": "Ann: hello\nClaude:", "prefix": True}
    assert {name: body[name] for name in flags} == flags
    assert body["stop"] == ["\nAnn:", CALLS_CLOSES[0]]
    assert "tools" not in body


@pytest.mark.parametrize("api", ["openai-chat", "openai-responses"])
def test_an_api_that_continues_no_text_refuses_the_mode(api: Any) -> None:
    with pytest.raises(RequestInvalid) as error:
        body_of(request(), api)
    assert error.value.where == "mode"


def test_parameters_that_are_text_need_no_type_and_all_others_have_theirs() -> None:
    properties = {
        "plain": {"type": "string"},
        "silent": {"description": "?"},
        "count": {"type": "integer"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "several": {"type": ["number", "null"]},
        "elsewhere": {"$ref": "#/$defs/x"},
    }
    generate = request(tools=[Tool(name="f", parameters={"type": "object", "properties": properties})])
    assert reading_of(generate, "anthropic", Quirks()).types == {
        "f": {
            "count": ["integer"],
            "maybe": ["string", "null"],
            "several": ["number", "null"],
            "elsewhere": ["any"],
        }
    }


GEMINI: dict[str, Any] = {"provider": "gemini", "model": "gemini-2.5-pro"}


def test_gemini_gets_a_token_after_each_message_and_continues_a_turn_of_its_own() -> None:
    path, body = body_of(request(message("Hello", "Alice"), message("Hi there", "Bob"), **GEMINI), "gemini")
    assert path == "/models/gemini-2.5-pro:streamGenerateContent"
    assert body["contents"] == [
        {"role": "user", "parts": [{"text": "Continue the conversation."}]},
        {"role": "model", "parts": [{"text": "Alice: Hello<|eot|>Bob: Hi there<|eot|>Claude:"}]},
    ]
    assert body["generationConfig"]["stopSequences"] == ["<|eot|>", "\nBob:", "\nAlice:", *CALLS_CLOSES]


def test_a_gemini_model_that_takes_no_last_turn_of_its_own_gets_the_text_as_the_users() -> None:
    asked = request(message("Hello", "Alice"), **{**GEMINI, "model": "gemini-4-pro"})
    _, body = body_of(asked, "gemini")
    assert body["contents"] == [{"role": "user", "parts": [{"text": "Alice: Hello<|eot|>Claude:"}]}]
    shown = request(Message(role="user", participant="Ann", content=[IMAGE]), message("and?"), **GEMINI)
    _, body = body_of(shown, "gemini", models_continuing=())
    assert [list(part) for part in body["contents"][0]["parts"]] == [["text"], ["inlineData"], ["text"]]


@pytest.mark.parametrize(
    ("options", "quirk", "written", "token"),
    [
        (PrefillOptions(), None, "Ann: a\nBob: b\nClaude:", ""),
        (PrefillOptions(delimiter="\n\n"), None, "Ann: a\n\nBob: b\n\nClaude:", ""),
        (PrefillOptions(end_of_turn="<end>"), None, "Ann: a<end>Bob: b<end>Claude:", "<end>"),
        (PrefillOptions(end_of_turn="<end>", delimiter="\n"), None, "Ann: a<end>\nBob: b<end>\nClaude:", "<end>"),
        (PrefillOptions(), "<end>", "Ann: a<end>Bob: b<end>Claude:", "<end>"),
        (PrefillOptions(end_of_turn=""), "<end>", "Ann: a\nBob: b\nClaude:", ""),
    ],
)
def test_the_separator_of_messages_comes_from_the_request_or_the_vendor(
    options: PrefillOptions, quirk: str | None, written: str, token: str
) -> None:
    generate = request(message("a", "Ann"), message("b", "Bob"), prefill=options)
    _, body = body_of(generate, end_of_turn=quirk)
    assert body["messages"][1]["content"] == written
    assert (body["stop_sequences"][0] == token) is bool(token)
    assert reading_of(generate, "anthropic", Quirks(end_of_turn=quirk)).end_of_turn == token


def test_a_provider_gets_the_token_only_if_it_must_stop_on_it() -> None:
    asked = request(prefill=PrefillOptions(end_of_turn="<end>", stop_on_end_of_turn=False))
    assert body_of(asked)[1]["stop_sequences"] == ["\nAnn:", *CALLS_CLOSES]
    assert reading_of(asked, "anthropic", Quirks()).end_of_turn == "<end>", "tokenbus stops on it all the same"


def test_the_first_user_message_is_the_requests_choice_and_precedes_media() -> None:
    options = PrefillOptions(first_user_message="<cmd>cat talk.txt</cmd>")
    _, body = body_of(request(prefill=options))
    assert body["messages"][0]["content"] == [{"type": "text", "text": "<cmd>cat talk.txt</cmd>"}]
    shown = request(Message(role="user", participant="Ann", content=[IMAGE]), message("and?"), prefill=options)
    _, body = body_of(shown)
    assert [block.get("text") for block in body["messages"][0]["content"]] == ["<cmd>cat talk.txt</cmd>", "Ann: ", None]


CROWD = (message("a", "Ann"), message("b", "Ann"), message("c", "Bob"), message("d", role="assistant"), message("e"))


@pytest.mark.parametrize(
    ("options", "written", "stops"),
    [
        (
            PrefillOptions(),
            "Ann: a\nAnn: b\nBob: c\nClaude: d\nUser: e\nClaude:",
            ("\nUser:", "\nBob:", "\nAnn:"),
        ),
        (
            PrefillOptions(names_once=True),
            "Ann: a\nb\nBob: c\nClaude: d\nUser: e\nClaude:",
            ("\nUser:", "\nBob:", "\nAnn:"),
        ),
        (
            PrefillOptions(unnamed=["Ann", "User"]),
            "a\nb\nBob: c\nClaude: d\ne\nClaude:",
            ("\nBob:",),
        ),
        (
            PrefillOptions(unnamed=["Claude"], delimiter="\n--\n"),
            "Ann: a\n--\nAnn: b\n--\nBob: c\n--\nd\n--\nUser: e\n--\n",
            ("\nUser:", "\nBob:", "\nAnn:"),
        ),
        (
            PrefillOptions(delimiter=" | "),
            "Ann: a | Ann: b | Bob: c | Claude: d | User: e | Claude:",
            (" | User:", " | Bob:", " | Ann:"),
        ),
    ],
)
def test_names_are_left_out_by_the_requests_rules_and_then_stop_nothing(
    options: PrefillOptions, written: str, stops: tuple[str, ...]
) -> None:
    generate = request(*CROWD, prefill=options)
    assert text_of(generate) == written
    assert reading_stops(generate) == stops


def test_the_models_name_is_optional_if_its_providers_token_ends_each_message() -> None:
    generate = request(message("a", "Ann"), prefill=PrefillOptions(unnamed=["Claude"]))
    assert transcribe(generate, [], "<|eot|>").text == "Ann: a<|eot|>"
    with pytest.raises(RequestInvalid) as refused:
        transcribe(generate, [])
    assert refused.value.where == "prefill.unnamed"


def test_the_reading_notes_whether_the_text_follows_a_name() -> None:
    assert reading_of(request(message("a", "Ann")), "anthropic", Quirks()).follows_a_name
    own = request(message("a", "Ann"), message("and", role="assistant"))
    unnamed = request(message("a", "Ann"), prefill=PrefillOptions(unnamed=["Claude"], end_of_turn="#"))
    assert not any(reading_of(generate, "anthropic", Quirks()).follows_a_name for generate in (own, unnamed))


def test_a_predicate_becomes_empty_names_before_the_request_travels() -> None:
    asked = unnamed_where(request(*CROWD), lambda m: m.participant == "Ann" and m.content == "b")
    assert text_of(asked) == "Ann: a\nb\nBob: c\nClaude: d\nUser: e\nClaude:"
    nobody = unnamed_where(request(message("a", "Ann"), message("b", role="assistant")), lambda _: True)
    assert text_of(nobody) == "a\nb", "the model's own last message is continued, named or not"
    assert reading_stops(nobody) == ()


def test_a_models_own_thinking_tags_are_read_beside_the_configured_one() -> None:
    quirks = Quirks(inline_thinking=("think",), models={"odd-": ThinkingTags(inline_thinking=("thought", "thinking"))})
    assert reading_of(request(), "anthropic", quirks).thinking == ("thinking", "think")
    assert reading_of(request(model="odd-1"), "anthropic", quirks).thinking == ("thinking", "thought")
