"""`gateway.drop_unsupported` reaches every refusal that names a parameter, on each surface."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.services.gateway.conformance import BUS, FIELDS, SURFACES, ask, with_options
from tests.services.gateway.rules import APIS
from tokenbus_services.gateway.problem import DROPPABLE, Problem, Refusal
from tokenbus_services.gateway.surfaces.contract import Translated
from tokenbus_services.gateway.surfaces.fields import MAX_REFUSED, Reading

Json = dict[str, Any]
CALL: Json = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ASKS: Json = {"role": "user", "content": "x"}
SAYS: Json = {"id": "m", "role": "user", "parts": [{"type": "text", "text": "x"}]}
OTHERS: dict[str, list[Json]] = {
    "Chat": [
        {"messages": [{"role": "user", "content": [{"type": "odd"}, {"type": "text", "text": "x"}]}]},
        {"messages": [{"role": "odd", "content": "x"}, ASKS]},
        {"messages": [ASKS, {"role": "assistant", "tool_calls": [CALL]},
                      {"role": "tool", "tool_call_id": "a", "content": [{"type": "file", "file": {"file_id": "x"}}]}]},
        {"response_format": {"type": "odd"}}, {"tool_choice": "odd"}, {"function_call": "auto"}, {"models": ["a"]},
    ],
    "Responses": [
        {"input": [{"type": "odd"}, ASKS]},
        {"input": [{"role": "user", "content": [{"type": "odd"}, {"type": "input_text", "text": "x"}]}]},
        {"input": [ASKS, {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
                   {"type": "function_call_output", "call_id": "a", "output": [
                       {"type": "input_file", "file_id": "x"}]}]},
        {"text": {"format": {"type": "odd"}}}, {"include": ["odd"]}, {"prompt": {"id": "x"}},
    ],
    "Messages": [
        {"messages": [{"role": "user", "content": [{"type": "odd"}, {"type": "text", "text": "x"}]}]},
        {"messages": [{"role": "user", "content": [
            {"type": "document", "source": {"type": "odd"}}, {"type": "text", "text": "x"}]}]},
        {"thinking": {"type": "odd"}}, {"tool_choice": {"type": "odd"}}, {"thread": "t"},
        {"system": [{"type": "odd", "text": "x"}]},
        {"tools": [{"type": "bash_20250124", "name": "bash"}, {"name": "f", "input_schema": {"type": "object"}}]},
    ],
    "Gemini": [
        {"contents": [{"parts": [{"odd": {}}, {"text": "x"}]}]},
        {"contents": [{"role": "odd", "parts": [{"text": "x"}]}, {"parts": [{"text": "x"}]}]},
        {"contents": [{"parts": [{"inlineData": {"mimeType": "odd/odd", "data": "AAAA"}}, {"text": "x"}]}]},
        {"generationConfig": {"responseModalities": ["TEXT", "ODD"]}},
        {"generation_config": {"image_config": {"a": 1}}},
        {"generationConfig": {"thinkingConfig": {"thinkingLevel": "ODD"}}}, {"cachedContent": "x"},
    ],
    "useChat": [
        {"messages": [{**SAYS, "parts": [{"type": "odd"}, *SAYS["parts"]]}]},
        {"messages": [{**SAYS, "parts": [
            {"type": "file", "mediaType": "image/png", "url": "https://a/b", "providerReference": {"a": "b"}}]}]},
        {"tools": [{"name": "f"}], "tokenbus": {"tools": ["weather"]}},
    ],
    "AG-UI": [
        {"messages": [{"id": "m", "role": "user", "content": [{"type": "odd"}, {"type": "text", "text": "x"}]}]},
        {"messages": [{"id": "n", "role": "odd", "content": "x"}, {"id": "m", **ASKS}]},
        {"resume": [{"interruptId": "i", "status": "resolved", "odd": 1}]},
    ],
    "Images": [{"style": "odd"}, {"output_format": "odd"}],
}  # fmt: skip
"""Requests with a part that nothing here supports."""
HEADERS: tuple[Mapping[str, str], ...] = (
    {"x-tokenbus-visible": "false"},
    {"x-tokenbus-max-tool-depth": "3"},
    {"x-tokenbus-on-failure": "restart"},
    {"x-tokenbus-on-disconnect": "odd"},
    {"x-tokenbus-run": "mine"},
)


def requests(name: str) -> Iterator[tuple[Json, Mapping[str, str]]]:
    """Each with one thing that some provider or surface does not support."""
    stream: Json = {"stream": True} if name in ("Chat", "Responses", "Messages") else {}
    for options in (*BUS.values(), {"odd": 1}, {"max_tool_depth": 3}, {"on_failure": "restart"}, {"extra": {"b": 1}}):
        yield {**with_options(name, options), **stream}, {}
    for headers in HEADERS:
        yield stream, headers
    for of_surface in FIELDS.values():
        if name in of_surface:
            yield of_surface[name], {}
    for changes in OTHERS[name]:
        yield changes, {}


def dropped(name: str, api: str, changes: Json, headers: Mapping[str, str]) -> set[str]:
    """What a deployment drops until this request is taken: each time the parameter of its refusal."""
    drop: set[str] = set()
    while isinstance(found := answer(name, api, changes, drop, headers), Problem):
        path = Reading.plain(found.param or "")
        assert found.code in DROPPABLE and path and path not in drop, (found, changes, headers)  # noqa: PT018
        drop.add(path)
    assert drop <= {*found.left_out}, (drop, found.left_out)
    return drop


def answer(name: str, api: str, changes: Json, drop: set[str], headers: Mapping[str, str]) -> Translated | Problem:
    try:
        return ask(name, api, changes, drop=drop, headers=headers)
    except Refusal as e:
        return e.problem


@pytest.mark.parametrize("name", SURFACES)
def test_a_parameter_that_is_refused_is_left_out_and_named_where_a_deployment_drops_it(name: str) -> None:
    refused = {api: sum(bool(dropped(name, api, *each)) for each in requests(name)) for api in APIS}
    assert all(count >= len(OTHERS[name]) // 2 for count in refused.values()), refused


def test_what_is_left_out_of_a_list_leaves_its_neighbours() -> None:
    texts = [{"type": "text", "text": each} for each in "abc"]
    content = [texts[0], {"type": "odd"}, texts[1], {"type": "other"}, texts[2]]
    messages = [ASKS, {"role": "user", "content": content}, {"role": "odd", "content": "d"}]
    drop = {"messages.content.type", "messages.role"}
    found = ask("Chat", "gemini", {"messages": messages}, drop=drop).generate
    assert [message.role for message in found.messages] == ["user", "user"]
    parts: Any = found.messages[1].content
    assert [part.text for part in parts] == ["a", "b", "c"]


def test_an_option_of_a_header_is_left_out_as_that_of_the_body_is() -> None:
    headers = {"x-tokenbus-visible": "false", "x-tokenbus-deadline-s": "7"}
    found = ask("useChat", "openai", {}, drop={"tokenbus.visible"}, headers=headers)
    assert (found.generate.visible, found.generate.deadline_s) == (True, 7)
    assert found.left_out == ["tokenbus.visible"]


def test_a_value_that_is_wrong_is_refused_though_its_field_is_dropped() -> None:
    with pytest.raises(Refusal) as caught:
        ask("Chat", "openai", {"messages": [ASKS, {"role": "user", "content": 5}]}, drop={"messages.content"})
    assert (caught.value.problem.param, caught.value.problem.code) == ("messages[1].content", "invalid_value")


def test_a_request_is_read_a_bounded_number_of_times() -> None:
    odd = [{"type": f"odd{i}"} for i in range(2 * MAX_REFUSED)]
    messages = [{"role": "user", "content": [*odd, {"type": "text", "text": "x"}]}]
    with pytest.raises(Refusal) as caught:
        ask("Chat", "gemini", {"messages": messages}, drop={"messages.content.type"})
    assert caught.value.problem.param == "messages[0].content[0].type"
