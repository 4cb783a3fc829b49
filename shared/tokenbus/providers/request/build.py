"""What all request builders share: the mode, tool ids that fit, stop strings, `extra` merged in."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import cast
from zlib import crc32

from tokenbus.errors import RequestInvalid
from tokenbus.events.requests import (
    Base64Source,
    DocumentPart,
    Effort,
    FileSource,
    Generate,
    ImagePart,
    Message,
    Mode,
    OutputSchema,
    Thinking,
    ToolResultPart,
    UrlSource,
)
from tokenbus.providers.api import Built, Format, Quirks

BUDGETS: dict[Effort, int] = {"minimal": 1024, "low": 4096, "medium": 8192, "high": 24_576}
"""Tokens of thinking for each effort, where a model counts in the other; all within what every such model takes."""


def fitted_id(tool_id: str, pattern: re.Pattern[str], max_length: int) -> str:
    """A tool call's id as an API takes it: unchanged where it fits, else the same for the same id, always.

    Ids come from whichever provider made the call; another one may refuse their letters or length.
    """
    if len(tool_id) <= max_length and pattern.fullmatch(tool_id):
        return tool_id
    mark = f"_{crc32(tool_id.encode(errors='replace')):08x}"
    return re.sub(r"[^A-Za-z0-9_-]", "_", tool_id)[: max_length - len(mark)] + mark


def told_stops(stops: list[str], limit: int | None, *, blanks: bool = True) -> list[str]:
    """The stop strings that a provider is told: each once, as many as it accepts, and none of blanks alone if it
    refuses those (``blanks`` False). `tokenbus.core.stop_strings` finds the others in its text."""
    return [stop for stop in dict.fromkeys(stops) if blanks or stop.strip()][:limit]


def formatted(
    formats: Mapping[Mode, Format],
    request: Generate,
    history: list[Message],
    quirks: Quirks,
    *,
    makes_images: bool = False,
) -> Built:
    """What the format of the request's mode makes of it. Raises RequestInvalid, also where there is none."""
    if request.images and not makes_images:
        raise RequestInvalid("images", "this provider API makes no images")
    if request.mode not in formats:
        raise RequestInvalid("mode", f"this provider API continues no text, so it takes no {request.mode} requests")
    return formats[request.mode](request, history, quirks)


def effort_of(thinking: Thinking) -> Effort | None:
    """The effort, or the least whose budget is the one that is asked for: some APIs take efforts alone."""
    if thinking.effort or not thinking.budget_tokens:
        return thinking.effort
    if thinking.budget_tokens <= BUDGETS["low"]:
        return "low"
    return "medium" if thinking.budget_tokens <= BUDGETS["medium"] else "high"


def budget_of(thinking: Thinking) -> int | None:
    """The budget in tokens, or that of the effort: some models take budgets alone."""
    return thinking.budget_tokens or (BUDGETS[thinking.effort] if thinking.effort else None)


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


def names_files(messages: Iterable[Message]) -> bool:
    """Whether media in these messages lie in the provider's own file store."""
    for message in messages:
        for part in message.content if isinstance(message.content, list) else ():
            inside = part.content if isinstance(part, ToolResultPart) else [part]
            if any(
                isinstance(media, ImagePart | DocumentPart) and isinstance(media.source, FileSource) for media in inside
            ):
                return True
    return False


def with_extra(
    body: dict[str, object], extra: dict[str, object] | None, *, lists: tuple[str, ...] = ("tools",)
) -> dict[str, object]:
    """The body with the request's `extra` in it: objects merge key by key, these lists join, all else is replaced.

    Raises RequestInvalid for `stream`, which decides how the answer is read, and for `model`, by whose name limits and
    policies are found.
    """
    if extra and "model" in extra:
        raise RequestInvalid("extra.model", "set the request's own field `model`")
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
