"""The rules of a request beyond its types."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tokenbus.core.request.validate import check_request
from tokenbus.errors import RequestInvalid
from tokenbus.events.requests import Cancel, Generate

TOOL: dict[str, Any] = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
CALL = {"type": "tool_call", "tool_id": "t1", "tool_name": "weather", "arguments": "{}"}
RESULT = {"type": "tool_result", "tool_id": "t1", "content": "sunny"}
IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}


def request(**fields: Any) -> Generate:
    base = {"type": "generate", "provider": "p", "model": "m", "messages": [{"role": "user", "content": "x"}]}
    return msgspec.convert({**base, **fields}, Generate)


def request_with(role: str, *parts: dict[str, Any]) -> Generate:
    return request(messages=[{"role": role, "content": list(parts)}])


@pytest.mark.parametrize(
    ("broken", "where"),
    [
        (request(tools=[TOOL, TOOL]), "tools[1].name"),
        (request(tools=[{"name": "a", "parameters": {"type": "banana"}}]), "tools[0].parameters.type"),
        (request(tools=[{"name": "a", "parameters": {"properties": {}}}]), "tools[0].parameters.type"),
        (
            request(tools=[{"name": "a", "parameters": {"type": "object", "properties": []}}]),
            "tools[0].parameters.properties",
        ),
        (
            request(tools=[{"name": "a", "parameters": {"type": "object", "required": "city"}}]),
            "tools[0].parameters.required",
        ),
        (request(tool_choice={"name": "weather"}), "tool_choice.name"),
        (request(tool_choice="any"), "tool_choice"),
        (request(messages=[{"role": "tool", "content": "sunny"}]), "messages[0].content"),
        (request_with("tool", {"type": "text", "text": "sunny"}), "messages[0].content[0]"),
        (request_with("assistant", RESULT), "messages[0].content[0]"),
        (request_with("user", CALL), "messages[0].content[0]"),
        (request_with("user", {"type": "thinking", "text": "hm"}), "messages[0].content[0]"),
        (request_with("system", IMAGE), "messages[0].content[0]"),
        (request_with("tool", {**RESULT, "tool_id": ""}), "messages[0].content[0].tool_id"),
        (request_with("assistant", {**CALL, "tool_id": ""}), "messages[0].content[0].tool_id"),
        (request_with("assistant", {**CALL, "tool_name": ""}), "messages[0].content[0].tool_name"),
        (request(mode="prefill"), "participant"),
        (request(mode="prefill", participant=" "), "participant"),
        (request(mode="prefill", participant="Ada", tools=[TOOL], tool_choice="any"), "tool_choice"),
        (request(mode="prefill", participant="Ada", output_schema={"schema": {}}), "output_schema"),
        (request(mode="prefill", participant="Ada", images={}), "images"),
        (request(mode="prefill", participant="Ada", tools=[{"name": 'a"b'}]), "tools[0].name"),
        (request(prefill={}), "prefill"),
        (request(mode="prefill", participant="Ada", prefill={"end_of_turn": " "}), "prefill.end_of_turn"),
        (request(mode="prefill", participant="Ada", prefill={"delimiter": ""}), "prefill.delimiter"),
        (
            request(mode="prefill", participant="Ada", prefill={"unnamed": ["Ada"], "end_of_turn": ""}),
            "prefill.unnamed",
        ),
    ],
)
def test_a_broken_rule_is_named_with_its_place(broken: Generate, where: str):
    with pytest.raises(RequestInvalid) as caught:
        check_request(broken)
    assert caught.value.where == where


@pytest.mark.parametrize(
    "sound",
    [
        request(),
        request(tools=[TOOL, {"name": "now"}], tool_choice={"name": "now"}),
        request(tools=[TOOL], tool_choice="any"),
        request(tool_choice="none"),
        request(mode="prefill", participant="Ada", prefill={"delimiter": "", "end_of_turn": "<|eot|>"}),
        request(mode="prefill", participant="Ada", prefill={"delimiter": "\n--\n", "unnamed": ["Ada"]}),
        request_with("user", {"type": "text", "text": "look"}, IMAGE),
        request_with("user", RESULT),
        request_with("tool", RESULT, {**RESULT, "tool_id": "t2"}),
        request_with(
            "assistant", {"type": "thinking", "text": "hm"}, CALL, {"type": "extra", "name": "n", "json": "{}"}
        ),
        request(mode="prefill", participant="Ada"),
        Cancel(run="a"),
    ],
)
def test_a_sound_request_passes(sound: Generate | Cancel):
    check_request(sound)


PNG = "iVBORw0KGgo="
BROKEN = {
    "": "it is empty",
    f"data:image/png;base64,{PNG}": "it is a data URL",
    "iVBORw0KGgo": "it is not base64",
    "iVBO Rw0KGgo=": "it is not base64",
    "iVBO\nRw0KGgo=": "it is not base64",
    "_-BORw0KGgo=": "it is not base64",
    "é" * 12: "it is not base64",
}


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("data", BROKEN)
def test_media_that_are_no_base64_are_refused_with_their_place_large_or_small(data: str, large: bool) -> None:
    if large and data:
        data = data + "AAAA" * 250_000
    source = {"type": "base64", "media_type": "image/png", "data": data}
    image, document = {"type": "image", "source": source}, {"type": "document", "source": source}
    places = {
        "messages[0].content[1].source.data": request_with("user", {"type": "text", "text": "x"}, image),
        "messages[0].content[0].source.data": request_with("user", document),
        "messages[0].content[0].content[0].source.data": request_with("tool", {**RESULT, "content": [image]}),
        "images.mask.source.data": request(images={"mask": image}),
    }
    for where, generate in places.items():
        with pytest.raises(RequestInvalid) as refused:
            check_request(generate)
        assert refused.value.where == where
        assert large or refused.value.problem.startswith(BROKEN[data])


@pytest.mark.parametrize("written", ["", "png", "image/", "/png", "image png", "image/png,image/gif"])
def test_what_is_no_media_type_is_refused_with_its_place(written: str) -> None:
    source = {"type": "base64", "media_type": written, "data": PNG}
    with pytest.raises(RequestInvalid) as refused:
        check_request(request_with("user", {"type": "image", "source": source}))
    assert refused.value.where == "messages[0].content[0].source.media_type"


@pytest.mark.parametrize("written", ["image/jpg", "IMAGE/PNG", " image/png ; q=1", 'text/plain;charset="x y"'])
def test_odd_spellings_of_media_types_are_taken(written: str) -> None:
    check_request(
        request_with("user", {"type": "image", "source": {"type": "base64", "media_type": written, "data": PNG}})
    )
