"""Builds a Chat Completions request: https://platform.openai.com/docs/api-reference/chat/create.

Vendors differ by `Quirks`. An assistant's text is sent as one string because many vendors accept nothing else. A
message cannot have text after a call, so calls always come last.
"""

from __future__ import annotations

import re

import msgspec

from tokenbus.errors import RequestInvalid
from tokenbus.events import requests
from tokenbus.providers.api import Built, Quirks
from tokenbus.providers.request.build import (
    accepted_stops,
    chosen_tool,
    data_url,
    deep_merged,
    effort_of,
    fitted_id,
    given,
    json_call,
    named_schema,
    schema_of,
    with_extra,
    with_own,
)
from tokenbus.providers.request.conversation import Spoken, Takes, conversation, own_extra, raw_json
from tokenbus.providers.request.turns import PartOption

MAX_STOP_STRINGS = 4

_TOOL_ID = re.compile(r"[^\s]+")
_MAX_TOOL_ID = 40
_list = msgspec.json.Decoder(list[msgspec.Raw])

ChatMessage = dict[str, object]


def build(request: requests.Generate, history: list[requests.Message], quirks: Quirks) -> Built:
    """Build the HTTP call for the next turn. Raises RequestInvalid, naming the field."""
    plain = bool(quirks.reasoning_back)
    has: tuple[PartOption, ...] = ("title", "detail", "lifetime") if quirks.cache_marks else ("title", "detail")
    takes = Takes(
        api="openai-chat",
        thinking=("reasoning_details",),
        plain_thinking=plain,
        names=True,
        free_text_calls=True,
        part_options=frozenset(has),
    )
    spoken, notes = conversation(request, history, takes)
    messages: list[ChatMessage] = []
    if request.system:
        parts = [requests.TextPart(text=request.system)] if isinstance(request.system, str) else request.system
        messages.append({"role": quirks.system_role, "content": _text(parts, quirks)})
    for message in spoken:
        messages += _messages(message, quirks)
    body: dict[str, object] = {"model": request.model, "messages": messages, "stream": request.stream}
    if quirks.continues == "message" and messages and messages[-1]["role"] == "assistant":
        messages[-1] |= quirks.continued
        body |= quirks.continuing
    if request.stream and quirks.stream_usage:
        body["stream_options"] = {"include_usage": True}
    body |= limits(request, quirks) | _tools(request)
    notes += display_note(request)
    return built("/chat/completions", body, request, notes)


def built(path: str, body: dict[str, object], request: requests.Generate, notes: tuple[str, ...]) -> Built:
    return Built(call=json_call(path, with_extra(body, request.extra)), notes=notes)


def display_note(request: requests.Generate) -> tuple[str, ...]:
    """The note for `thinking.display`, which this API does not have."""
    asked = request.thinking is not None and request.thinking.display is not None
    return ("thinking.display has no effect: this API has no such option",) if asked else ()


def limits(request: requests.Generate, quirks: Quirks) -> dict[str, object]:
    """Output limit and format, thinking, sampling and stop strings."""
    payload = given({quirks.max_tokens_field: request.max_tokens})
    if request.thinking:
        payload |= _thinking(request.thinking, quirks)
    if request.output_schema:
        payload["response_format"] = {"type": "json_schema", "json_schema": named_schema(request.output_schema)}
    elif request.json_object:
        payload["response_format"] = {"type": "json_object"}
    return payload | given(
        {
            "temperature": request.temperature,
            "top_p": request.top_p,
            "seed": request.seed,
            "frequency_penalty": request.frequency_penalty,
            "presence_penalty": request.presence_penalty,
            quirks.user_field: request.user_id,
            "stop": accepted_stops(request.stop, max_stops(quirks)) or None,
        }
    )


def max_stops(quirks: Quirks) -> int:
    """The number of stop strings that the vendor accepts."""
    return MAX_STOP_STRINGS if quirks.max_stop_strings is None else quirks.max_stop_strings


def _thinking(thinking: requests.Thinking, quirks: Quirks) -> dict[str, object]:
    """Thinking options. The API itself has efforts but no budgets: a budget without a vendor field becomes an
    effort.
    """
    if not thinking.wanted:
        return quirks.thinking_off or _placed(quirks.effort_field, "none")
    payload = quirks.thinking_on
    if effort := thinking.effort if quirks.budget_field else effort_of(thinking):
        payload = deep_merged(payload, _placed(quirks.effort_field, effort))
    if thinking.budget_tokens:
        payload = deep_merged(payload, _placed(quirks.budget_field, thinking.budget_tokens))
    return payload


def _placed(path: str, value: object) -> dict[str, object]:
    """``{"a": {"b": value}}`` for the path ``a.b``; empty for an empty path."""
    name, _, inner = path.partition(".")
    return {name: _placed(inner, value) if inner else value} if name else {}


def _tools(request: requests.Generate) -> dict[str, object]:
    payload: dict[str, object] = {}
    if request.tools:
        payload["tools"] = [with_own(_tool(tool), tool.extra, "openai-chat") for tool in request.tools]
    return payload | chosen_tool(request, lambda kind, name: {"type": kind, kind: {"name": name}})


def _tool(tool: requests.Tool) -> dict[str, object]:
    described: dict[str, object] = {"description": tool.description} if tool.description else {}
    if isinstance(tool.format, requests.GrammarFormat):
        grammar = {"syntax": tool.format.syntax, "definition": tool.format.definition}
        described["format"] = {"type": "grammar", "grammar": grammar}
    if tool.format:
        return {"type": "custom", "custom": {"name": tool.name, **described}}
    strict = {} if tool.strict is None else {"strict": tool.strict}
    function = {"name": tool.name, "parameters": schema_of(tool.parameters), **described, **strict}
    return {"type": "function", "function": function}


def _messages(message: Spoken, quirks: Quirks) -> list[ChatMessage]:
    match message.role:
        case "tool":
            return _results(message, quirks)
        case "assistant":
            payload = _assistant(message, quirks)
        case "user":
            content = user_content(message, quirks)
            payload = [{"role": "user", "content": content}] if content else []
        case "system":
            texts = [part for part in message.parts if isinstance(part, requests.TextPart)]
            payload = [{"role": quirks.system_role, "content": _text(texts, quirks)}]
    if message.participant:
        for one in payload:
            one["name"] = message.participant
    return [deep_merged(one, message.extra) for one in payload]


def user_content(message: Spoken, quirks: Quirks) -> object:
    """A string for a single text, otherwise a list of parts."""
    parts: list[object] = []
    for i, part in enumerate(message.parts):
        match part:
            case requests.TextPart():
                parts.append(_text_part(part, quirks))
            case requests.ImagePart():
                parts.append(_image(part, quirks, f"{message.where}.content[{i}]"))
            case requests.DocumentPart():
                parts.append(_with_own(_document(part, quirks), part))
            case requests.ExtraPart():
                if (raw := own_extra(part, "openai-chat", f"{message.where}.content[{i}]")) is not None:
                    parts.append(raw)
            case _:
                pass  # conversation() allows no other part in a user message
    only = message.parts[0]
    if isinstance(only, requests.TextPart) and parts == [{"type": "text", "text": only.text}]:
        return only.text
    return parts


def _assistant(message: Spoken, quirks: Quirks) -> list[ChatMessage]:
    texts: list[requests.TextPart] = []
    thoughts: list[str] = []
    details: list[msgspec.Raw] = []
    calls: list[dict[str, object]] = []
    payload: ChatMessage = {"role": "assistant"}
    for i, part in enumerate(message.parts):
        where = f"{message.where}.content[{i}]"
        match part:
            case requests.TextPart() if part.opaque and (spoken := part.opaque.get("audio")):
                payload["audio"] = {"id": spoken}
            case requests.TextPart():
                texts.append(part)
            case requests.ThinkingPart():
                thoughts.append(part.text)
                if part.opaque and (given := part.opaque.get("reasoning_details")):
                    details += _details(given, f"{where}.opaque.reasoning_details")
            case requests.ToolCallPart():
                calls.append(_call(part, where))
            case _:
                pass  # a provider-specific item: this API accepts none in assistant messages
    said = "".join(part.text for part in texts)
    payload["content"] = _own_parts(texts, quirks) or said or None
    if calls:
        payload["tool_calls"] = calls
    if details:
        payload["reasoning_details"] = details
    if quirks.reasoning_back == "content" and any(thoughts):
        thought = {"type": "thinking", "thinking": [{"type": "text", "text": "".join(thoughts)}]}
        payload["content"] = [thought, *([{"type": "text", "text": said}] if said else [])]
    elif quirks.reasoning_back and any(thoughts):
        payload[quirks.reasoning_back] = "".join(thoughts)
    return [payload] if payload["content"] or calls or "audio" in payload else []


def _call(part: requests.ToolCallPart, where: str) -> dict[str, object]:
    payload: dict[str, object] = {"id": _fitted(part.tool_id)}
    if part.free_text:
        payload |= {"type": "custom", "custom": {"name": part.tool_name, "input": part.arguments}}
    else:
        function = {"name": part.tool_name, "arguments": part.arguments or "{}"}
        payload |= {"type": "function", "function": function}
    if part.opaque and (extra := part.opaque.get("extra_content")):
        payload["extra_content"] = raw_json(extra, f"{where}.opaque.extra_content")
    return _with_own(payload, part)


def _details(given: str, where: str) -> list[msgspec.Raw]:
    try:
        return _list.decode(given)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        raise RequestInvalid(where, "not a JSON list") from None


def _results(message: Spoken, quirks: Quirks) -> list[ChatMessage]:
    """One message per result. Tool messages hold only text, so images follow in a user message."""
    payload: list[ChatMessage] = []
    images: list[object] = []
    for part in message.parts:
        if not isinstance(part, requests.ToolResultPart):
            continue
        content = [requests.TextPart(text=part.content)] if isinstance(part.content, str) else part.content
        texts = [inner for inner in content if isinstance(inner, requests.TextPart)]
        shown = [_image(inner, quirks, message.where) for inner in content if isinstance(inner, requests.ImagePart)]
        if shown:
            images += [{"type": "text", "text": f"Images of the result of {part.tool_id}:"}, *shown]
        text = _own_parts(texts, quirks) or "\n".join(inner.text for inner in texts)
        result: ChatMessage = {"role": "tool", "tool_call_id": _fitted(part.tool_id), "content": text}
        payload.append(_with_own(result, part))
    if images:
        payload.append({"role": "user", "content": images})
    return payload


def _text(parts: list[requests.TextPart], quirks: Quirks) -> object:
    """System text as one string, or as parts if cache marks must be placed between them."""
    if quirks.cache_marks and any(part.cache for part in parts):
        return [_text_part(part, quirks) for part in parts if part.text]
    return _own_parts(parts, quirks) or "\n\n".join(part.text for part in parts if part.text)


def _own_parts(parts: list[requests.TextPart], quirks: Quirks) -> list[dict[str, object]] | None:
    """Texts as parts, if any has fields of this API."""
    has_own = any((part.extra or {}).get("openai-chat") for part in parts)
    return [_text_part(part, quirks) for part in parts] if has_own else None


def _text_part(part: requests.TextPart, quirks: Quirks) -> dict[str, object]:
    return _with_own({"type": "text", "text": part.text} | _cache(part.cache, quirks), part)


def _image(part: requests.ImagePart, quirks: Quirks, where: str) -> dict[str, object]:
    assert not isinstance(part.source, requests.BlobSource)  # conversation() rejects these
    if isinstance(part.source, requests.FileSource):
        raise RequestInvalid(f"{where}.source", "Chat Completions does not accept images by file id")
    image = {"url": data_url(part.source)} | ({"detail": part.detail} if part.detail else {})
    return _with_own({"type": "image_url", "image_url": image} | _cache(part.cache, quirks), part)


def _document(part: requests.DocumentPart, quirks: Quirks) -> dict[str, object]:
    assert not isinstance(part.source, requests.BlobSource)
    if isinstance(part.source, requests.FileSource):
        file = {"file_id": part.source.file_id}
    else:
        file = {"filename": part.title or "document", "file_data": data_url(part.source)}
    return {"type": "file", "file": file} | _cache(part.cache, quirks)


def _cache(mark: requests.Cache, quirks: Quirks) -> dict[str, object]:
    lifetime = {"ttl": mark} if isinstance(mark, str) else {}
    return {"cache_control": {"type": "ephemeral", **lifetime}} if mark and quirks.cache_marks else {}


def _with_own(
    payload: dict[str, object],
    part: requests.TextPart
    | requests.ImagePart
    | requests.DocumentPart
    | requests.ToolCallPart
    | requests.ToolResultPart,
) -> dict[str, object]:
    return with_own(payload, part.extra, "openai-chat")


def _fitted(tool_id: str) -> str:
    return fitted_id(tool_id, _TOOL_ID, _MAX_TOOL_ID)
