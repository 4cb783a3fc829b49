"""Conversations of voice frameworks as requests of the bus."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tokenbus import Generate
from tokenbus.errors import RequestInvalid
from tokenbus.integrations.chat_request import chat_request

TOOL: Any = {"type": "function", "function": {"name": "place", "parameters": {"type": "object"}, "description": None}}
CALL: Any = {"id": "c1", "type": "function", "function": {"name": "place", "arguments": "{}"}}


def request(messages: list[Any], tools: Any = (), choice: Any = None) -> Generate:
    fields = chat_request(messages, tools, choice)
    return msgspec.convert({"type": "generate", "provider": "p", "model": "m", **fields}, Generate)


def test_a_conversation_keeps_its_roles_texts_calls_and_results() -> None:
    got = request(
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Where?"}]},
            {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "here"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
        ],
        [TOOL],
        "required",
    )
    assert [message.role for message in got.messages] == ["system", "user", "assistant", "tool", "assistant"]
    kinds = [[type(part).__name__ for part in message.content] for message in got.messages[2:]]
    assert kinds == [["TextPart", "ToolCallPart"], ["ToolResultPart"], ["ToolCallPart"]]
    assert (got.tools[0].name, got.tool_choice, got.max_tool_depth) == ("place", "any", 0)


def test_a_tool_without_parameters_is_not_taken_for_one_of_the_deployment() -> None:
    got = request([{"role": "user", "content": "x"}], [{"type": "function", "function": {"name": "now"}}])
    assert got.tools[0].parameters == {"type": "object"}


def test_one_tool_may_be_forced_and_a_request_without_tools_has_no_tool_fields() -> None:
    choice = {"type": "function", "function": {"name": "place"}}
    named = request([{"role": "user", "content": "x"}], [TOOL], choice)
    assert named.tool_choice
    assert chat_request([{"role": "user", "content": "x"}], [], choice) == {
        "messages": [{"role": "user", "content": "x"}]
    }


@pytest.mark.parametrize("url", ["https://example.com/a.png", "data:image/png;base64,AAAA"])
def test_images_are_sent_by_url_or_whole(url: str) -> None:
    request([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}])


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ({"role": "function", "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[0].content[0]"),
    ],
)
def test_what_the_bus_cannot_carry_is_refused_by_its_place(message: Any, where: str) -> None:
    with pytest.raises(RequestInvalid) as caught:
        chat_request([message], [], None)
    assert caught.value.where == where
