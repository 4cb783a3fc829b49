"""What all request builders share: tool ids that fit, stop strings within the limit, `extra` merged in."""

from __future__ import annotations

import re
from typing import cast
from zlib import crc32

from tokenbus.errors import RequestInvalid
from tokenbus.events.requests import Base64Source, Generate, OutputSchema, UrlSource


def fitted_id(tool_id: str, pattern: re.Pattern[str], max_length: int) -> str:
    """A tool call's id as an API takes it: unchanged where it fits, else the same for the same id, always.

    Ids come from whichever provider made the call; another one may refuse their letters or length.
    """
    if len(tool_id) <= max_length and pattern.fullmatch(tool_id):
        return tool_id
    mark = f"_{crc32(tool_id.encode(errors='replace')):08x}"
    return re.sub(r"[^A-Za-z0-9_-]", "_", tool_id)[: max_length - len(mark)] + mark


def chat_only(request: Generate) -> None:
    """Raises RequestInvalid where the request asks for prefill mode."""
    if request.mode != "chat":
        raise RequestInvalid("mode", f"this provider API takes chat requests only, not {request.mode}")


def stop_strings(request: Generate, limit: int | None) -> list[str]:
    """The stop strings. Raises RequestInvalid where there are more than the provider takes."""
    if limit is not None and len(request.stop) > limit:
        raise RequestInvalid("stop", f"this provider takes {limit} stop strings, not {len(request.stop)}")
    return request.stop


def needs_tools(request: Generate) -> bool:
    """Whether tool_choice is to be sent: APIs refuse it where there is no tool.

    Raises RequestInvalid where a tool must be called and there is none.
    """
    if request.tools or (request.extra and request.extra.get("tools")):
        return True
    if request.tool_choice not in (None, "auto", "none"):
        raise RequestInvalid("tool_choice", "a tool must be called, and there are none")
    return False


def schema_of(parameters: dict[str, object]) -> dict[str, object]:
    """A tool's parameters; a tool without any takes an empty object."""
    return parameters or {"type": "object", "properties": {}}


def named_schema(output: OutputSchema) -> dict[str, object]:
    """The schema of the answer, as both of OpenAI's APIs take it."""
    said: dict[str, object] = {"name": output.name, "schema": output.schema}
    return said if output.strict is None else said | {"strict": output.strict}


def data_url(source: Base64Source | UrlSource) -> str:
    """A source as one URL."""
    return source.url if isinstance(source, UrlSource) else f"data:{source.media_type};base64,{source.data}"


def with_extra(
    body: dict[str, object], extra: dict[str, object] | None, *, lists: tuple[str, ...] = ("tools",)
) -> dict[str, object]:
    """The body with the request's `extra` in it: objects merge key by key, these lists join, all else is replaced.

    Raises RequestInvalid for `stream`, which decides how the answer is read.
    """
    if extra and "stream" in extra:
        raise RequestInvalid("extra.stream", "set the request's own field `stream`")
    merged = deep_merged(body, extra or {})
    for name in lists:
        ours, more = body.get(name), (extra or {}).get(name)
        if isinstance(ours, list) and isinstance(more, list):
            merged[name] = [*cast("list[object]", ours), *cast("list[object]", more)]
    return merged


def deep_merged(body: dict[str, object], extra: dict[str, object]) -> dict[str, object]:
    """Both, objects key by key, all else as ``extra`` has it."""
    merged = dict(body)
    for name, value in extra.items():
        ours = merged.get(name)
        if isinstance(ours, dict) and isinstance(value, dict):
            merged[name] = deep_merged(cast("dict[str, object]", ours), cast("dict[str, object]", value))
        else:
            merged[name] = value
    return merged
