"""Optional request fields that only some APIs have. An API rejects those that it lacks; it never ignores one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from tokenbus.errors import RequestInvalid
from tokenbus.events.requests import Generate

RequestOption = Literal[
    "json_object",
    "parallel_tool_calls",
    "seed",
    "top_k",
    "frequency_penalty",
    "presence_penalty",
    "user_id",
    "strict_tools",
    "free_text_tools",
]
"""``strict_tools`` and ``free_text_tools`` are the fields `strict` and `format` of tools; the others are fields of the
request.
"""


def reject_missing_options(request: Generate, has: frozenset[RequestOption]) -> None:
    """Raise RequestInvalid, naming field and provider, for the first option that the API does not have.

    A value that means what every API does anyway is accepted: no strictness, parallel calls, a penalty of 0.
    """
    for option, where in _used_options(request):
        if option not in has:
            problem = f"the API of provider {request.provider!r} has no such option"
            raise RequestInvalid(where, f"{problem}; {_INSTEAD[option]}" if option in _INSTEAD else problem)


_INSTEAD: dict[RequestOption, str] = {
    "json_object": "`output_schema` may do, or the prompt",
    "free_text_tools": "a tool with `parameters` of one string may do",
}


def _used_options(request: Generate) -> Iterator[tuple[RequestOption, str]]:
    """Each option that the request uses, and the place of its field."""
    if request.json_object:
        yield "json_object", "json_object"
    if request.parallel_tool_calls is False:
        yield "parallel_tool_calls", "parallel_tool_calls"
    if request.seed is not None:
        yield "seed", "seed"
    if request.top_k is not None:
        yield "top_k", "top_k"
    if request.frequency_penalty:
        yield "frequency_penalty", "frequency_penalty"
    if request.presence_penalty:
        yield "presence_penalty", "presence_penalty"
    if request.user_id is not None:
        yield "user_id", "user_id"
    for i, tool in enumerate(request.tools):
        if tool.strict:
            yield "strict_tools", f"tools[{i}].strict"
        if tool.format:
            yield "free_text_tools", f"tools[{i}].format"
