"""A request that holds too much of anything is refused, with the place and the bound."""

from __future__ import annotations

from typing import Any

import pytest

from tokenbus.core.request import bounds
from tokenbus.core.request import parse as plain
from tokenbus.core.request.parse import decode_request, request_from
from tokenbus.errors import RequestInvalid


def request_with(**fields: Any) -> dict[str, Any]:
    message = {"role": "user", "content": "hello"}
    return {"type": "generate", "provider": "p", "model": "m", "messages": [message], **fields}


def parts(*content: dict[str, Any], role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": list(content)}]


def text(count: int) -> list[dict[str, Any]]:
    return [{"type": "text", "text": "x"}] * count


def schema(size: int) -> dict[str, Any]:
    return {"type": "object", "description": "x" * size}


LONG = "x" * (bounds.MAX_NAME_CHARS + 1)
CALL = {"type": "tool_call", "tool_id": "t", "tool_name": "n", "arguments": "{}"}
RESULT = {"type": "tool_result", "tool_id": "t", "content": ""}
URL = {"type": "url", "url": "https://" + "x" * bounds.MAX_URL_CHARS}


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"messages": [{"role": "user", "content": "x"}] * (bounds.MAX_MESSAGES + 1)}, "messages"),
        ({"messages": parts(*text(bounds.MAX_PARTS + 1))}, "messages[0].content"),
        ({"messages": parts({**RESULT, "content": text(bounds.MAX_PARTS + 1)})}, "messages[0].content[0].content"),
        ({"messages": [{"role": "user", "content": "x", "participant": LONG}]}, "messages[0].participant"),
        ({"messages": parts({**CALL, "tool_id": LONG}, role="assistant")}, "messages[0].content[0].tool_id"),
        ({"messages": parts({**CALL, "tool_name": LONG}, role="assistant")}, "messages[0].content[0].tool_name"),
        ({"messages": parts({**RESULT, "tool_id": LONG})}, "messages[0].content[0].tool_id"),
        ({"messages": parts({"type": "image", "source": URL})}, "messages[0].content[0].source.url"),
        ({"messages": parts({"type": "document", "source": URL})}, "messages[0].content[0].source.url"),
        ({"images": {"mask": {"source": URL}}}, "images.mask.source.url"),
        (
            {"messages": parts({**RESULT, "content": [{"type": "image", "source": URL}]})},
            "messages[0].content[0].content[0].source.url",
        ),
        (
            {"messages": parts({"type": "text", "text": "", "opaque": {str(i): "" for i in range(65)}})},
            "messages[0].content[0].opaque",
        ),
        (
            {"messages": parts({"type": "text", "text": "", "opaque_blobs": {str(i): "" for i in range(65)}})},
            "messages[0].content[0].opaque_blobs",
        ),
        (
            {"messages": parts({"type": "image", "source": URL, "opaque": {str(i): "" for i in range(65)}})},
            "messages[0].content[0].opaque",
        ),
        ({"system": text(bounds.MAX_PARTS + 1)}, "system"),
        ({"tools": [{"name": f"t{i}"} for i in range(bounds.MAX_TOOLS + 1)]}, "tools"),
        ({"tools": [{"name": "t", "parameters": schema(bounds.MAX_SCHEMA_BYTES)}]}, "tools[0].parameters"),
        ({"tools": [{"name": "t", "description": "x" * 65_537}]}, "tools[0].description"),
        ({"output_schema": {"schema": schema(bounds.MAX_SCHEMA_BYTES)}}, "output_schema.schema"),
        ({"stop": ["x"] * (bounds.MAX_STOPS + 1)}, "stop"),
        ({"stop": ["a", "x" * (bounds.MAX_STOP_CHARS + 1)]}, "stop[1]"),
        ({"metadata": {"x": "x" * bounds.MAX_METADATA_BYTES}}, "metadata"),
        ({"extra": {"x": "x" * bounds.MAX_EXTRA_BYTES}}, "extra"),
        ({"participant": LONG}, "participant"),
        ({"deadline_s": 1e306}, "deadline_s"),
        ({"tool_timeout_s": 1e306}, "tool_timeout_s"),
        ({"max_tokens": 2**40}, "max_tokens"),
        ({"extra": {"x": [[0] * 1000] * 250}}, "extra.x[50]"),
        ({"extra": {"x": {str(i): i for i in range(plain.MAX_VALUES)}}}, "extra.x"),
    ],
)
def test_too_much_of_anything_is_refused_with_its_place(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(RequestInvalid) as refused:
        request_from(request_with(**fields))
    assert refused.value.where == where or (where.startswith("extra.x[") and refused.value.where.startswith("extra.x["))


def test_what_is_just_within_the_bounds_is_taken() -> None:
    request = request_with(
        messages=[{"role": "user", "content": "x"}] * bounds.MAX_MESSAGES,
        tools=[{"name": f"t{i}"} for i in range(bounds.MAX_TOOLS)],
        stop=["x" * bounds.MAX_STOP_CHARS] * bounds.MAX_STOPS,
        metadata={"x": "x" * (bounds.MAX_METADATA_BYTES - 8)},
        deadline_s=bounds.MAX_SECONDS,
        max_tokens=bounds.MAX_TOKENS,
    )
    assert request_from(request)


def test_millions_of_tiny_values_are_refused_before_they_are_walked() -> None:
    data = b'{"type":"generate","extra":{"x":[' + b",".join([b"[]"] * 1_300_000) + b"]}}"
    with pytest.raises(RequestInvalid, match="values in all") as refused:
        decode_request({b"__data__": data})
    assert refused.value.where == "extra.x"
