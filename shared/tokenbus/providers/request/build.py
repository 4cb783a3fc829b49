"""Shared by all request builders: mode dispatch, tool id fitting, stop strings, merging `extra`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import cast
from zlib import crc32

import msgspec

from tokenbus.errors import RequestInvalid
from tokenbus.events import requests
from tokenbus.events.quirks import ApiName
from tokenbus.providers import plugins
from tokenbus.providers.api import Built, Format, HttpCall, Quirks
from tokenbus.providers.request.options import RequestOption, reject_missing_options

LEVELS: tuple[requests.Effort, ...] = ("minimal", "low", "medium", "high", "xhigh", "max")
BUDGETS: dict[requests.Effort, int] = {"minimal": 1024, "low": 4096, "medium": 8192, "high": 24_576}
"""Thinking tokens for each effort, for models that take only a budget. Every such model accepts these values."""


def fitted_id(tool_id: str, pattern: re.Pattern[str], max_length: int) -> str:
    """Make a tool call id acceptable to an API: unchanged if it fits, otherwise rewritten deterministically.

    Ids come from whichever provider made the call; another provider may reject their characters or length.
    """
    if len(tool_id) <= max_length and pattern.fullmatch(tool_id):
        return tool_id
    mark = f"_{crc32(tool_id.encode(errors='replace')):08x}"
    return re.sub(r"[^A-Za-z0-9_-]", "_", tool_id)[: max_length - len(mark)] + mark


def json_call(path: str, body: Mapping[str, object], query: dict[str, str] | None = None) -> HttpCall:
    """The call that posts a JSON body."""
    headers = {"content-type": "application/json"}
    return HttpCall(path=path, query=query or {}, body=msgspec.json.encode(body), headers=headers)


def given(fields: Mapping[str, object]) -> dict[str, object]:
    """The fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def system_texts(system: str | list[requests.TextPart] | None) -> list[str]:
    """The texts of the request's system field, for an API that takes nothing else with them."""
    parts = [system] if isinstance(system, str) else [part.text for part in system or ()]
    return [text for text in parts if text]


def accepted_stops(stops: list[str], limit: int | None, *, blanks: bool = True) -> list[str]:
    """Return the stop strings to send: deduplicated, at most ``limit``, and without whitespace-only ones if ``blanks``
    is False.

    `tokenbus.core.stop_strings` finds the remaining ones in the text.
    """
    return [stop for stop in dict.fromkeys(stops) if blanks or stop.strip()][:limit]


def formatted(
    formats: Mapping[requests.Mode, Format],
    request: requests.Generate,
    history: list[requests.Message],
    quirks: Quirks,
    *,
    makes_images: bool = False,
    options: frozenset[RequestOption] = frozenset(),
) -> Built:
    """Build the request in the format of its mode. Raises RequestInvalid if the API lacks the mode or an option."""
    if request.images and not makes_images:
        raise RequestInvalid("images", "this provider API does not generate images")
    if request.mode not in formats:
        raise RequestInvalid("mode", f"this provider API does not support {request.mode} requests")
    reject_missing_options(request, options)
    if request.mode == "prefill" and (free := [i for i, tool in enumerate(request.tools) if tool.format]):
        raise RequestInvalid(f"tools[{free[0]}].format", "mode prefill has no tools with free text")
    _check_extra_names(request)
    return formats[request.mode](request, history, quirks)


def extras_of_objects(request: requests.Generate) -> Iterator[tuple[str, requests.Extra]]:
    """Yield where an object of the request has further fields by API, and these."""
    objects: list[tuple[str, requests.Extra | None]] = [
        (f"tools[{i}]", tool.extra) for i, tool in enumerate(request.tools)
    ]
    for i, part in enumerate(request.system if isinstance(request.system, list) else ()):
        objects.append((f"system[{i}]", part.extra))
    for i, message in enumerate(request.messages):
        objects.append((f"messages[{i}]", message.extra))
        for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
            where = f"messages[{i}].content[{j}]"
            objects.append((where, getattr(part, "extra", None)))
            if isinstance(part, requests.ToolResultPart) and isinstance(part.content, list):
                objects += ((f"{where}.content[{k}]", inside.extra) for k, inside in enumerate(part.content))
    yield from ((f"{where}.extra", extra) for where, extra in objects if extra)


def _check_extra_names(request: requests.Generate) -> None:
    """Raise RequestInvalid for fields of an object that are for an API which does not exist."""
    for where, extra in extras_of_objects(request):
        for api in extra:
            if api not in plugins.names():
                known = ", ".join(map(repr, plugins.names()))
                raise RequestInvalid(where, f"no API has the name {api[:64]!r}: must be one of {known}")


def with_own(payload: Mapping[str, object], extra: requests.Extra | None, api: ApiName) -> dict[str, object]:
    """Merge the fields that an object of the request has for this API."""
    own = (extra or {}).get(api)
    return deep_merged(dict(payload), own) if own else dict(payload)


def effort_of(thinking: requests.Thinking) -> requests.Effort | None:
    """The requested effort, or the smallest effort that covers the requested budget: some APIs take efforts only."""
    if thinking.effort or not thinking.budget_tokens:
        return thinking.effort
    if thinking.budget_tokens <= BUDGETS["low"]:
        return "low"
    return "medium" if thinking.budget_tokens <= BUDGETS["medium"] else "high"


def budget_of(thinking: requests.Thinking) -> int | None:
    """The requested budget in tokens, or the budget of the effort: some models take budgets only."""
    return thinking.budget_tokens or (BUDGETS[nearest_effort(thinking.effort, BUDGETS)] if thinking.effort else None)


def nearest_effort(effort: requests.Effort, known: Collection[requests.Effort]) -> requests.Effort:
    """The effort itself, or the next lower one that the API knows, or its lowest."""
    levels: list[requests.Effort] = [level for level in LEVELS if level in known]
    lower: list[requests.Effort] = [level for level in levels if LEVELS.index(level) <= LEVELS.index(effort)]
    return lower[-1] if lower else levels[0]


def effort_note(thinking: requests.Thinking | None, known: Collection[requests.Effort]) -> tuple[str, ...]:
    """The note for an effort that the API does not know; see `nearest_effort`."""
    effort = thinking.effort if thinking and thinking.wanted else None
    if effort is None or effort in known:
        return ()
    return (f"thinking.effort: {effort!r} became {nearest_effort(effort, known)!r}, the nearest that this model has",)


def needs_tools(request: requests.Generate) -> bool:
    """Whether to send tool_choice: APIs reject it if there are no tools.

    Raises RequestInvalid if a tool call is required but there are no tools.
    """
    if request.tools or (request.extra and request.extra.get("tools")):
        return True
    if request.tool_choice not in (None, "auto", "none"):
        raise RequestInvalid("tool_choice", "a tool call is required, but the request has no tools")
    return False


def chosen_tool(request: requests.Generate, named: Callable[[str, str], dict[str, object]]) -> dict[str, object]:
    """Which tools the model calls, in the form that both OpenAI APIs use. ``named``: a tool by kind and name. Raises
    RequestInvalid; see `needs_tools`.
    """
    if not needs_tools(request):
        return {}
    parallel, choice = request.parallel_tool_calls, request.tool_choice
    payload: dict[str, object] = {} if parallel is None else {"parallel_tool_calls": parallel}
    if isinstance(choice, requests.ToolChoice):
        free = any(tool.format for tool in request.tools if tool.name == choice.name)
        payload["tool_choice"] = named("custom" if free else "function", choice.name)
    elif choice is not None:
        payload["tool_choice"] = "required" if choice == "any" else choice
    return payload


def schema_of(parameters: dict[str, object]) -> dict[str, object]:
    """A tool's parameter schema; an empty object schema if it has no parameters."""
    return parameters or {"type": "object", "properties": {}}


def named_schema(output: requests.OutputSchema) -> dict[str, object]:
    """The output schema in the form that both OpenAI APIs use."""
    payload: dict[str, object] = {"name": output.name, "schema": output.schema}
    return payload if output.strict is None else payload | {"strict": output.strict}


def data_url(source: requests.Base64Source | requests.UrlSource) -> str:
    """Express a source as a single URL."""
    return source.url if isinstance(source, requests.UrlSource) else f"data:{source.media_type};base64,{source.data}"


def names_files(messages: Iterable[requests.Message]) -> bool:
    """Whether any media in these messages is stored in the provider's file store."""
    for message in messages:
        for part in message.content if isinstance(message.content, list) else ():
            inside = part.content if isinstance(part, requests.ToolResultPart) else [part]
            if any(
                isinstance(media, requests.ImagePart | requests.DocumentPart)
                and isinstance(media.source, requests.FileSource)
                for media in inside
            ):
                return True
    return False


_CONVERSATION = ("messages", "input", "contents", "system", "instructions", "systemInstruction", "system_instruction")


def with_extra(
    body: dict[str, object], extra: dict[str, object] | None, *, lists: tuple[str, ...] = ("tools",)
) -> dict[str, object]:
    """Merge the request's `extra` into the body: objects merge by key, the ``lists`` concatenate, other values are
    replaced.

    Raises RequestInvalid for `stream`, which decides how the answer is read, for `model`, which selects limits and
    policies, and for what would replace the conversation.
    """
    if extra and "model" in extra:
        raise RequestInvalid("extra.model", "set the request's own field `model`")
    if extra and "stream" in extra:
        raise RequestInvalid("extra.stream", "set the request's own field `stream`")
    for name in _CONVERSATION:
        if extra and name in extra and name in body:
            problem = "it would replace the conversation of the request; use its `messages` and `system`"
            raise RequestInvalid(f"extra.{name}", problem)
    merged = deep_merged(body, extra or {})
    for name in lists:
        ours, more = body.get(name), (extra or {}).get(name)
        if isinstance(ours, list) and isinstance(more, list):
            merged[name] = [*cast("list[object]", ours), *cast("list[object]", more)]
    return merged


def deep_merged(body: dict[str, object], extra: dict[str, object]) -> dict[str, object]:
    """Merge objects recursively; other values come from ``extra``."""
    merged = dict(body)
    for name, value in extra.items():
        ours = merged.get(name)
        if isinstance(ours, dict) and isinstance(value, dict):
            merged[name] = deep_merged(cast("dict[str, object]", ours), cast("dict[str, object]", value))
        else:
            merged[name] = value
    return merged
