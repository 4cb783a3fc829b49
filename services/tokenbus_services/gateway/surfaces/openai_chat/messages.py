"""Messages and content parts of Chat Completions as those of the bus. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, cast, get_args

import msgspec

from tokenbus.events import requests
from tokenbus_services.gateway.problem import invalid
from tokenbus_services.gateway.surfaces.answering import answering
from tokenbus_services.gateway.surfaces.contract import GatewayRequest, Translated, TranslationRules
from tokenbus_services.gateway.surfaces.fields import Fields, Json
from tokenbus_services.gateway.surfaces.openai_chat.answer import ChatEcho
from tokenbus_services.gateway.surfaces.surface import (
    SurfaceRequest,
    client_metadata,
    effort_thinking,
    format_of,
)

_ROLES = ("system", "developer", "user", "assistant", "tool")
_OF_RESULTS = ("text", "image_url")
_KINDS = (*_OF_RESULTS, "file", "refusal")
"""Of content parts."""
_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)(?:;[\w=.+-]+)*;base64,(.*)", re.DOTALL)
_CACHE_MARKS = ("prompt_cache_breakpoint", "cache_control")
"""OpenAI's, and what clients of routers send: of a part, of a call, or of a message."""
_IGNORED = ("reasoning_content", "reasoning", "reasoning_details", "annotations", "refusal", "parsed")
"""Fields of an assistant message that clients send back. Thinking is unsigned here, so no provider would take it."""


def messages_of(body: Fields) -> list[requests.Message]:
    """Read the conversation. Raises Refusal."""
    messages: list[requests.Message] = []
    for fields in body.each("messages"):
        role = fields.needed("role", fields.one_of("role", _ROLES))
        messages.append(_message(fields, role))
    if not messages:
        raise invalid("messages", "at least one message is required")
    return messages


def _message(fields: Fields, role: str) -> requests.Message:
    mark = _cache_mark(fields, whole=False)
    message = _read(fields, role)
    if extra := fields.own("openai-chat"):
        message = msgspec.structs.replace(message, extra=extra)
    return msgspec.structs.replace(message, content=_marked(message.content, mark)) if mark else message


def _marked(content: str | list[requests.ContentPart], mark: requests.Cache) -> str | list[requests.ContentPart]:
    """The content of a message that has a cache mark, on the last part that can have one."""
    parts: list[requests.ContentPart] = [requests.TextPart(text=content)] if isinstance(content, str) else [*content]
    for i in reversed(range(len(parts))):
        part = parts[i]
        if isinstance(part, requests.ToolCallPart):
            parts[i] = _marked_call(part, mark)
        elif isinstance(part, requests.TextPart | requests.ImagePart | requests.DocumentPart | requests.ToolResultPart):
            parts[i] = msgspec.structs.replace(part, cache=mark)
        else:
            continue
        break
    return parts if content else content


def _marked_call(call: requests.ToolCallPart, mark: requests.Cache) -> requests.ToolCallPart:
    lifetime = {"ttl": mark} if isinstance(mark, str) else {}
    marked: requests.Extra = {"anthropic": {"cache_control": {"type": "ephemeral", **lifetime}}}
    return msgspec.structs.replace(call, extra={**(call.extra or {}), **marked})


def _read(fields: Fields, role: str) -> requests.Message:
    name = fields.text("name")
    match role:
        case "tool":
            tool_id = fields.needed("tool_call_id", fields.text("tool_call_id"))
            content = _content(fields)
            parts = (
                content if isinstance(content, str) else cast("list[requests.TextPart | requests.ImagePart]", content)
            )
            extra = fields.own("openai-chat")
            result = requests.ToolResultPart(tool_id=tool_id, tool_name=name, content=parts, extra=extra)
            return requests.Message(role="tool", content=[result])
        case "assistant":
            return requests.Message(role="assistant", content=_assistant(fields), participant=name)
        case "developer":
            return requests.Message(role="system", content=_content(fields), participant=name)
        case _:
            return requests.Message(
                role=cast("Literal['system', 'user']", role), content=_content(fields), participant=name
            )


def _assistant(fields: Fields) -> str | list[requests.ContentPart]:
    for name in _IGNORED:
        fields.take(name)
    fields.refuse("is not supported by this gateway", "function_call")
    content: str | list[requests.ContentPart] = "" if not fields.has("content") else _content(fields)
    if spoken := _spoken(fields):
        content = [*(content if isinstance(content, list) else []), spoken]
    calls: list[requests.ContentPart] = []
    for call in fields.each("tool_calls"):
        call.take("index")  # of a stream's delta, sent back by some clients
        mark = _cache_mark(call, whole=False)
        kind = call.needed("type", call.one_of("type", ("function", "custom")))
        field = "input" if kind == "custom" else "arguments"
        function = call.needed(kind, call.fields(kind))
        part = requests.ToolCallPart(
            tool_id=call.needed("id", call.text("id")),
            tool_name=function.needed("name", function.text("name")),
            arguments=function.needed(field, function.text(field)),
            free_text=kind == "custom",
            extra=call.own("openai-chat"),
        )
        calls.append(_marked_call(part, mark) if mark else part)
    if not calls:
        return content
    parts: list[requests.ContentPart] = (
        [requests.TextPart(text=content)] if isinstance(content, str) and content else []
    )
    return [*(content if isinstance(content, list) else parts), *calls]


def _spoken(fields: Fields) -> requests.TextPart | None:
    """What the model said as sound: a text for all providers, by its id for the one that made it."""
    audio = fields.fields("audio")
    if audio is None:
        return None
    said, own = audio.text("transcript"), audio.text("id")
    audio.take_rest()
    return requests.TextPart(text=said, opaque={"audio": own, "api": "openai-chat"} if own else None) if said else None


def _content(fields: Fields) -> str | list[requests.ContentPart]:
    if fields.is_text("content"):
        return fields.text("content") or ""
    if not isinstance(fields.peek("content"), list):
        raise invalid(fields.path("content"), "must be a string or a list of parts")
    if fields.value.get("role") == "user":
        return fields.each_read("content", lambda part: _part(part, whole=True), _raw)
    kinds = _OF_RESULTS if fields.value.get("role") == "tool" else _KINDS
    return fields.each_read("content", lambda part: _part(part, kinds, whole=False), None)


def _raw(part: Json) -> requests.ContentPart:
    return requests.ExtraPart(name=f"openai-chat.{part.get('type')}", json=msgspec.json.encode(part).decode())


def _cache_mark(fields: Fields, *, whole: bool) -> requests.Cache:
    """Whether the prompt is cached up to here. A provider with this API gets the mark with the ``whole`` part, where it
    can have parts.
    """
    found: requests.Cache = False
    for name in _CACHE_MARKS:
        if fields.reading.passes and whole:
            fields.hint(name)
        if mark := fields.take(name):
            if fields.reading.passes:
                fields.reading.leave_out(fields.path(name))
            found = "1h" if isinstance(mark, dict) and cast("Json", mark).get("ttl") == "1h" else True
    return found


def _part(part: Fields, kinds: Sequence[str] = _KINDS, *, whole: bool) -> requests.ContentPart:
    cache = _cache_mark(part, whole=whole)
    match part.needed("type", part.one_of("type", kinds)):
        case "text":
            text = part.needed("text", part.text("text"))
            return requests.TextPart(text=text, cache=cache, extra=None if whole else part.own("openai-chat"))
        case "refusal":
            return requests.TextPart(text=part.needed("refusal", part.text("refusal")))
        case "image_url":
            image = part.needed("image_url", part.fields("image_url"))
            image.hint("detail", "auto")
            return requests.ImagePart(
                source=_source(image.needed("url", image.text("url")), image.path("url")), cache=cache
            )
        case _:
            file = part.needed("file", part.fields("file"))
            title, data, file_id = file.text("filename"), file.text("file_data"), file.text("file_id")
            if file_id is not None:
                return requests.DocumentPart(source=requests.FileSource(file_id=file_id), title=title, cache=cache)
            source = _source(file.needed("file_data", data), file.path("file_data"))
            return requests.DocumentPart(source=source, title=title, cache=cache)


def _source(url: str, where: str) -> requests.Source:
    if found := _DATA_URL.fullmatch(url):
        return requests.Base64Source(media_type=found[1], data=found[2])
    if url.startswith(("http://", "https://")):
        return requests.UrlSource(url=url)
    raise invalid(where, "must be an http(s) URL, or a data: URL in base64")


_HINTS: dict[str, tuple[object, ...]] = {
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
    "prompt_cache_options": ({},),
    "safety_identifier": (),
    "store": (False,),
}
"""Parameters that only providers of this API take and that change no answer's meaning, with what all do anyway."""
_NEUTRAL: dict[str, object] = {
    "n": 1,
    "logprobs": False,
    "top_logprobs": 0,
    "logit_bias": {},
    "modalities": ["text"],
    "functions": [],
}
"""Parameters that have no counterpart on the bus, with the value of each that changes nothing."""


def read(asked: GatewayRequest, rules: TranslationRules, body: Fields) -> Translated:
    """Translate a request. Raises Refusal."""
    name, stream = body.needed("model", body.text("model")), body.flag("stream") or False
    ask = SurfaceRequest(asked, rules, body, model=name, stream=stream, speaks="openai-chat", shows_arguments=stream)
    usage = _stream_options(body, stream=stream)
    tools = ask.raw_tools(body.each_read("tools", lambda tool: _tool(tool, ask), dict))
    for name, value in _NEUTRAL.items():
        body.only(name, value, why="with this value is not supported by this gateway")
    for name, values in _HINTS.items():
        body.hint(name, *values)
    fields: Json = {
        "messages": messages_of(body),
        "max_tokens": _max_tokens(body),
        "temperature": body.number("temperature"),
        "top_p": body.share("top_p"),
        "stop": _stop(body),
        "thinking": effort_thinking(body.one_of("reasoning_effort", get_args(requests.Effort))),
        **_output_format(body, ask),
        "seed": ask.optional("seed", body, "seed", lambda name: body.whole(name, least=None)),
        "user_id": ask.optional("user_id", body, "user", body.text, "") or None,
        "frequency_penalty": ask.optional("frequency_penalty", body, "frequency_penalty", body.penalty, 0, 0.0) or None,
        "presence_penalty": ask.optional("presence_penalty", body, "presence_penalty", body.penalty, 0, 0.0) or None,
        "tool_choice": _tool_choice(ask, tools) if tools or "tools" in ask.extra or ask.bus_tools else _no_choice(ask),
        "metadata": client_metadata(body),
    }
    ask.one_call("parallel_tool_calls", True, tools=tools, choice=fields["tool_choice"])
    fields["parallel_tool_calls"] = body.flag("parallel_tool_calls")
    reasoning = ask.bus.flag("reasoning") is not False
    found = ask.translated(fields, tools=tools, echo=ChatEcho, echoed={"usage": usage, "reasoning": reasoning})
    return answering(found, "messages")


def _max_tokens(body: Fields) -> int | None:
    new, old = body.whole("max_completion_tokens", least=1), body.whole("max_tokens", least=1)
    if new is not None and old is not None and new != old:
        raise invalid("max_tokens", "differs from max_completion_tokens")
    return old if new is None else new


def _stop(body: Fields) -> list[str]:
    if body.is_text("stop"):
        return [stop] if (stop := body.text("stop")) else []
    return [stop for stop in body.texts("stop") if stop]


def _output_format(body: Fields, ask: SurfaceRequest) -> Json:
    form = body.fields("response_format")
    if form is None:
        return {}
    kind = form.needed("type", form.one_of("type", ("text", "json_schema", "json_object")))
    if kind == "json_object":
        return ask.json_object()
    if kind == "text":
        return {}
    schema = form.needed("json_schema", form.fields("json_schema"))
    schema.hint("description")
    output = requests.OutputSchema(
        schema=schema.needed("schema", schema.json("schema")),
        name=schema.text("name") or "answer",
        strict=schema.flag("strict"),
    )
    return {"output_schema": output}


def _tool(tool: Fields, ask: SurfaceRequest) -> requests.Tool | Json:
    kinds = ("function", "custom") if "free_text_tools" in ask.has else ("function",)
    if tool.needed("type", tool.one_of("type", kinds)) == "custom":
        custom = tool.needed("custom", tool.fields("custom"))
        name = custom.needed("name", custom.text("name"))
        return requests.Tool(name=name, description=custom.text("description"), format=format_of(custom))
    function = tool.needed("function", tool.fields("function"))
    return requests.Tool(
        name=function.needed("name", function.text("name")),
        description=function.text("description"),
        parameters=function.json("parameters") or {"type": "object"},
        strict=ask.optional("strict_tools", function, "strict", function.flag, False),
    )


def _tool_choice(ask: SurfaceRequest, tools: Sequence[requests.Tool] = ()) -> Any:
    body = ask.body
    given = body.peek("tool_choice")
    if not isinstance(given, dict):
        choice = body.one_of("tool_choice", ("auto", "none", "required"))
        return "any" if choice == "required" else choice
    kind = cast("Json", given).get("type")
    if ask.is_raw_tool(cast("Json", given).get(str(kind)), tools):
        return None
    if kind not in ("function", "custom"):
        body.refuse(f"of type {str(kind)[:100]!r} is not supported", "tool_choice")
        return None
    choice = body.needed("tool_choice", body.fields("tool_choice"))
    choice.take("type")
    function = choice.needed(kind, choice.fields(kind))
    return requests.ToolChoice(name=function.needed("name", function.text("name")))


def _no_choice(ask: SurfaceRequest) -> None:
    """Without tools there is nothing to choose: clients send the field all the same."""
    _tool_choice(ask)


def _stream_options(body: Fields, *, stream: bool) -> bool:
    options = body.fields("stream_options")
    if options is None:
        return False
    if not stream:
        raise invalid("stream_options", "is for streams only")
    options.flag("include_obfuscation")  # accepted and not done: it only adds noise
    return options.flag("include_usage") or False
