"""A conversation as one text: what the model reads, where it goes on, and which strings stop it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tokenbus.core.prefill.setting import reading_of
from tokenbus.errors import RequestInvalid
from tokenbus.events.requests import (
    Base64Source,
    Generate,
    ImagePart,
    Message,
    TextPart,
    Thinking,
    Tool,
    ToolCallPart,
    ToolResultPart,
)
from tokenbus.events.vendor import Quirks
from tokenbus.providers import registry
from tokenbus.providers.transcript import CALLS_CLOSES, provider_stops, reading_stops, transcribe

IMAGE = ImagePart(source=Base64Source(media_type="image/png", data="AAAA"))


def message(text: str, who: str | None = None, role: Any = "user") -> Message:
    return Message(role=role, content=text, participant=who)


def request(*messages: Message, **fields: Any) -> Generate:
    given: dict[str, Any] = {"mode": "prefill", "participant": "Claude", "provider": "anthropic", "model": "m"}
    return Generate(**{**given, "messages": list(messages) or [message("hello", "Ann")], **fields})


def text_of(asked: Generate, history: list[Message] | None = None) -> str:
    [text] = transcribe(asked, history or []).parts
    assert isinstance(text, str)
    return text


def body_of(asked: Generate, api: Any = "anthropic", **quirks: Any) -> tuple[str, dict[str, Any]]:
    call = registry.get(api).build(asked, [], Quirks(**quirks)).call
    return call.path, json.loads(call.body)


def test_a_line_a_message_and_the_models_name_at_the_end() -> None:
    asked = request(message("hello", "Ann"), message("hi", role="assistant"), message("and you?", "Bob"))
    assert text_of(asked) == "Ann: hello\nClaude: hi\nBob: and you?\nClaude:"


def test_thinking_that_is_on_begins_in_the_text_and_so_does_its_reading() -> None:
    asked = request(thinking=Thinking())
    assert text_of(asked).endswith("\nClaude: <thinking>")
    reading = reading_of(asked)
    assert reading
    assert reading.inside == "thinking"


def test_the_models_own_last_message_is_continued() -> None:
    asked = request(message("hello", "Ann"), message("I am", role="assistant"), thinking=Thinking())
    assert text_of(asked) == "Ann: hello\nClaude: I am"
    reading = reading_of(asked)
    assert reading
    assert reading.inside == ""


def test_an_empty_name_is_left_out_and_stops_nothing() -> None:
    asked = request(message("It rains.", ""), message("hello", "Ann"))
    assert text_of(asked) == "It rains.\nAnn: hello\nClaude:"
    assert reading_stops(asked) == ("\nAnn:",)


def test_what_the_model_wrote_stands_verbatim_and_results_right_after_it_escaped() -> None:
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
    asked = request(
        message("hello", "Ann"),
        Message(role="assistant", content=[TextPart(text="Let me see."), call]),
        Message(role="tool", content=[ToolResultPart(tool_id="a", content="7")]),
    )
    assert text_of(asked).endswith(
        'Let me see.\n<function_calls>\n<invoke name="f">\n<parameter name="q">x</parameter>\n'
        '<parameter name="n">[1]</parameter>\n</invoke>\n</function_calls><function_results>\n'
        '<result tool_use_id="a">7</result>\n</function_results>'
    )


def test_the_latest_names_come_first_then_the_calls_end_then_the_requests_own_up_to_the_limit() -> None:
    asked = request(*(message("x", f"P{i}") for i in range(12)), message("y", role="assistant"), stop=["END"])
    names = [f"\nP{i}:" for i in range(11, 1, -1)]
    assert provider_stops(asked, None) == [*names, *CALLS_CLOSES, "END"]
    assert provider_stops(asked, 11) == [*names, CALLS_CLOSES[0]]
    assert reading_stops(asked) == (*names, "END"), "what the provider is not told of is found in the text"


def test_images_stand_in_place_in_the_users_message() -> None:
    asked = request(Message(role="user", participant="Ann", content=[TextPart(text="look:"), IMAGE]), message("and?"))
    _, body = body_of(asked)
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


def test_tools_are_told_in_the_system_text() -> None:
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


@pytest.mark.parametrize("api", ["openai-chat", "openai-responses", "gemini"])
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
    reading = reading_of(request(tools=[Tool(name="f", parameters={"type": "object", "properties": properties})]))
    assert reading
    assert reading.types == {
        "f": {
            "count": ["integer"],
            "maybe": ["string", "null"],
            "several": ["number", "null"],
            "elsewhere": ["any"],
        }
    }
    assert reading_of(request(mode="chat")) is None
