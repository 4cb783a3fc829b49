"""Messages and content blocks of the Messages API as messages and parts of the bus. Pure."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast, get_args

import msgspec

from tokenbus.events import requests
from tokenbus_services.gateway.problem import NO_THREAD, UNSUPPORTED, Problem, Refusal, invalid, unsupported
from tokenbus_services.gateway.surfaces.answering import answering
from tokenbus_services.gateway.surfaces.contract import GatewayRequest, Translated, TranslationRules
from tokenbus_services.gateway.surfaces.fields import Fields, Json, unpack_opaque
from tokenbus_services.gateway.surfaces.hosted import originals
from tokenbus_services.gateway.surfaces.surface import SurfaceRequest

Role = Literal["user", "assistant", "system"]
_Readers = Mapping[str, Callable[[Fields], requests.ContentPart]]
_HOSTED = (
    *("server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result"),
    *("bash_code_execution_tool_result", "mcp_tool_use", "mcp_tool_result"),
)


def messages_of(body: Fields) -> list[requests.Message]:
    """Read the conversation. Raises Refusal."""
    messages: list[requests.Message] = []
    for fields in body.each("messages"):
        role = cast("Role", fields.needed("role", fields.one_of("role", _READERS)))
        content = _content(fields, _READERS[role])
        messages.append(requests.Message(role=role, content=content, extra=fields.own("anthropic")))
    if not messages:
        raise invalid("messages", "at least one message is required")
    return messages


def user_content(fields: Fields) -> str | list[requests.ContentPart]:
    """Read the `content` of what a user says. Raises Refusal."""
    said = {kind: reader for kind, reader in _READERS["user"].items() if kind != "tool_result"}
    return _content(fields, said)


def result_of(block: Fields) -> requests.ToolResultPart:
    """Read what a client says a call has given: `tool_use_id`, `content`, `is_error`. Raises Refusal."""
    return _tool_result(block)


def system_of(body: Fields) -> list[requests.TextPart]:
    """Read the system prompt: a string or text blocks. Raises Refusal."""
    if body.is_text("system"):
        text = body.text("system")
        return [requests.TextPart(text=text)] if text else []
    parts: list[requests.TextPart] = []
    for block in body.each("system"):
        block.needed("type", block.one_of("type", ("text",)))
        text = _text(block)
        parts.append(msgspec.structs.replace(text, extra=block.own("anthropic")))
    return parts


def cache_mark(fields: Fields) -> requests.Cache:
    """Read `cache_control`. Raises Refusal for a lifetime that there is not."""
    control = fields.fields("cache_control")
    if control is None:
        return False
    control.one_of("type", ("ephemeral",))
    return "1h" if control.one_of("ttl", ("5m", "1h")) == "1h" else True


def _content(fields: Fields, readers: _Readers) -> str | list[requests.ContentPart]:
    if fields.is_text("content"):
        return fields.text("content") or ""
    if not fields.has("content"):
        raise invalid(fields.path("content"), "this field is required")
    return [part for part in fields.each_read("content", lambda block: _part(block, readers), _raw) if part]


def _raw(block: Json) -> requests.ContentPart | None:
    if block.get("type") in ("tool_use", "tool_result"):
        return None  # the bus pairs them
    return requests.ExtraPart(name=f"anthropic.{block.get('type')}", json=msgspec.json.encode(block).decode())


def _part(block: Fields, readers: _Readers) -> requests.ContentPart | None:
    if block.peek("tokenbus") and block.peek("type") in _HOSTED:
        # What stands for another API's item has it; a result beside its call has none.
        parts = originals(block.take_rest()["tokenbus"].get("items"))
        return parts[0] if parts else None
    return readers[block.needed("type", block.one_of("type", readers))](block)


def _text(block: Fields) -> requests.TextPart:
    block.hint("citations")  # of this API they pass as they are
    return requests.TextPart(text=block.needed("text", block.text("text")), cache=cache_mark(block))


def _image(block: Fields) -> requests.ImagePart:
    block.only("transformations", {})
    return requests.ImagePart(source=_source(block, ("base64", "url", "file")), cache=cache_mark(block))


def _document(block: Fields) -> requests.DocumentPart:
    if citations := block.fields("citations"):
        citations.only("enabled", False, why="only providers of this API make citations when asked")
    source = _source(block, ("base64", "text", "url", "file"))
    return requests.DocumentPart(source=source, title=block.text("title"), cache=cache_mark(block))


def _source(block: Fields, kinds: tuple[str, ...]) -> requests.Source:
    source = block.needed("source", block.fields("source"))
    kind = source.needed("type", source.one_of("type", kinds))

    def needed(name: str) -> str:
        return source.needed(name, source.text(name))

    read: requests.Source
    match kind:
        case "base64":
            read = requests.Base64Source(media_type=needed("media_type"), data=needed("data"))
        case "text":
            source.one_of("media_type", ("text/plain",))
            data = b64encode(needed("data").encode("utf-8", "replace")).decode()
            read = requests.Base64Source(media_type="text/plain", data=data)
        case "url":
            read = requests.UrlSource(url=needed("url"))
        case _:
            read = requests.FileSource(file_id=needed("file_id"))
    return read


def _thinking(block: Fields) -> requests.ThinkingPart:
    text, signature = block.text("thinking") or "", block.text("signature") or ""
    if opaque := unpack_opaque(signature):
        return requests.ThinkingPart(text=text, signature=opaque.pop("signature", None), opaque=opaque or None)
    return requests.ThinkingPart(text=text, signature=signature or None)


def _redacted(block: Fields) -> requests.ThinkingPart:
    data = block.needed("data", block.text("data"))
    return requests.ThinkingPart(opaque=unpack_opaque(data) or {"redacted": data})


def _tool_use(block: Fields) -> requests.ToolCallPart:
    tool_id, name = block.needed("id", block.text("id")), block.needed("name", block.text("name"))
    arguments = msgspec.json.encode(block.json("input") or {}).decode()
    # The call stays one of the bus, which pairs it with its result; what else it has goes back with it.
    if block.reading.passes and (rest := block.take_rest()):
        return requests.ToolCallPart(
            tool_id=tool_id,
            tool_name=name,
            arguments=arguments,
            opaque={"api": "anthropic", "fields": msgspec.json.encode(rest).decode()},
        )
    cache_mark(block)  # the bus marks no calls; the result that follows is the better place
    if caller := block.fields("caller"):
        caller.only("type", "direct")
    block.take("toolset_name")
    return requests.ToolCallPart(tool_id=tool_id, tool_name=name, arguments=arguments)


def _tool_result(block: Fields) -> requests.ToolResultPart:
    content: str | list[requests.TextPart | requests.ImagePart] = ""
    if block.is_text("content"):
        content = block.text("content") or ""
    elif block.has("content"):
        inside: _Readers = {"text": _text, "image": _image}
        content = cast(
            "list[requests.TextPart | requests.ImagePart]", [_part(inner, inside) for inner in block.each("content")]
        )
    tool_id, failed = block.needed("tool_use_id", block.text("tool_use_id")), block.flag("is_error") or False
    cache = cache_mark(block)
    rest = block.take_rest() if block.reading.passes else {}
    block.take("toolset_name")
    return requests.ToolResultPart(
        tool_id=tool_id, content=content, is_error=failed, cache=cache, extra={"anthropic": rest} if rest else None
    )


_READERS: Mapping[str, _Readers] = {
    "user": {"text": _text, "image": _image, "document": _document, "tool_result": _tool_result},
    "assistant": {"text": _text, "thinking": _thinking, "redacted_thinking": _redacted, "tool_use": _tool_use},
    "system": {"text": _text},
}


BETA = "anthropic-beta"


def read(asked: GatewayRequest, rules: TranslationRules, body: Fields) -> Translated:
    """Translate a request. Raises Refusal."""
    name, stream = body.needed("model", body.text("model")), body.flag("stream") or False
    if body.has("thread"):
        raise Refusal(
            Problem(
                status=400,
                code=NO_THREAD,
                message="threads are not kept by this gateway: send the whole conversation",
                kind="invalid_request",
                param="thread",
            )
        )
    ask = SurfaceRequest(asked, rules, body, model=name, stream=stream, speaks="anthropic", shows_arguments=stream)
    system = _system(ask)
    tools, marked = _tools(ask)
    if marked and system:  # the prompt up to the system text begins with the tools
        system[0] = msgspec.structs.replace(system[0], cache=marked)
    fields: Json = {
        "system": system or None,
        "messages": messages_of(body),
        "max_tokens": body.needed("max_tokens", body.whole("max_tokens", least=1)),
        "stop": [stop for stop in body.texts("stop_sequences") if stop],
        "temperature": body.number("temperature"),
        "top_p": body.share("top_p"),
        **_thinking_option(ask),
        **_tool_choice(ask, tools),
        **_metadata(ask),
        "top_k": ask.optional("top_k", body, "top_k", body.whole),
    }
    _only_some(ask)
    if ask.passes and (betas := [name.strip() for name in asked.headers.get(BETA, "").split(",") if name.strip()]):
        ask.extra["anthropic_beta"] = betas
    return answering(ask.translated(fields, tools=tools), "messages")


def _system(ask: SurfaceRequest) -> list[requests.TextPart]:
    """The system text; what is more than that goes to a provider of this API as it is."""
    given = ask.body.peek("system")
    try:
        return system_of(ask.body)
    except Refusal as e:
        if not ask.passes or e.problem.code != UNSUPPORTED:
            raise
    ask.extra["system"] = given
    return []


def _thinking_option(ask: SurfaceRequest) -> Json:
    """Thinking, effort and output format: the last two share `output_config`."""
    thinking: requests.Thinking | None = None
    kinds = ("enabled", "disabled", "adaptive")
    if ask.passes and _is_of_another_type(ask.body.peek("thinking"), kinds):
        ask.extra["thinking"] = ask.body.json("thinking")  # of a newer model
    elif asked := ask.body.fields("thinking"):
        kind = asked.needed("type", asked.one_of("type", kinds))
        budget = asked.whole("budget_tokens", least=1)
        if kind == "enabled" and budget is None:
            raise invalid("thinking.budget_tokens", "this field is required")
        asked.hint("display", "summarized")
        thinking = requests.Thinking(enabled=kind != "disabled", budget_tokens=None if kind == "disabled" else budget)
    read: Json = {}
    if config := ask.body.fields("output_config"):
        effort = cast("requests.Effort | None", config.one_of("effort", get_args(requests.Effort)))
        if effort and thinking and thinking.enabled:
            thinking = msgspec.structs.replace(thinking, effort=effort)
        elif effort and ask.model.api == "anthropic":
            ask.extra["output_config"] = {"effort": effort}  # holds without thinking too
        elif effort and thinking:
            raise unsupported("output_config.effort", "this provider has no effort without thinking")
        elif effort:
            thinking = requests.Thinking(effort=effort)
        if form := config.fields("format"):
            form.needed("type", form.one_of("type", ("json_schema",)))
            read["output_schema"] = requests.OutputSchema(schema=form.needed("schema", form.json("schema")))
    return {**read, "thinking": thinking}


def _is_of_another_type(given: object, known: Sequence[str]) -> bool:
    kind = cast("Json", given).get("type") if isinstance(given, dict) else None
    return isinstance(kind, str) and kind not in known


def _tools(ask: SurfaceRequest) -> tuple[list[requests.Tool], requests.Cache]:
    """The client's tools, and the last cache mark among them."""
    marked: list[requests.Cache] = [False]
    # Tools that the bus does not know follow the others. Beside them, one with more fields (a cache mark, say) stays in
    # its place.
    given = ask.body.peek("tools")
    mixed = isinstance(given, list) and any(_is_of_another_type(each, ("custom",)) for each in cast("list[Any]", given))

    def tool(fields: Fields) -> requests.Tool | Json:
        fields.one_of("type", ("custom",))
        read = requests.Tool(
            name=fields.needed("name", fields.text("name")),
            description=fields.text("description"),
            parameters=fields.needed("input_schema", fields.json("input_schema")),
            strict=ask.optional("strict_tools", fields, "strict", fields.flag, False),
        )
        if ask.passes:
            rest = fields.take_rest()
            if rest and mixed:
                return fields.value
            return msgspec.structs.replace(read, extra={"anthropic": rest}) if rest else read
        mark = cache_mark(fields)
        fields.hint("defer_loading", False)
        fields.only("allowed_callers", ["direct"])
        fields.hint("input_examples", [])
        fields.take("eager_input_streaming")  # arguments are passed on as the provider sends them
        marked.append(mark or marked[-1])
        return read

    tools = ask.raw_tools(ask.body.each_read("tools", tool, dict))
    return tools, marked[-1]


def _tool_choice(ask: SurfaceRequest, tools: list[requests.Tool]) -> Json:
    given = ask.body.fields("tool_choice")
    if given is None:
        return {}
    kind = given.needed("type", given.one_of("type", ("auto", "any", "none", "tool")))
    choice = requests.ToolChoice(name=given.needed("name", given.text("name"))) if kind == "tool" else kind
    ask.one_call("disable_parallel_tool_use", False, tools=tools, choice=choice, of=given)
    one = given.flag("disable_parallel_tool_use")
    return {"tool_choice": choice, "parallel_tool_calls": False if one else None}


def _metadata(ask: SurfaceRequest) -> Json:
    fields = ask.body.fields("metadata")
    user = fields.text("user_id") if fields else None
    if not user:
        return {}
    if "user_id" not in ask.has:
        ask.body.reading.leave_out("metadata.user_id")
    return {"metadata": {"client": {"user_id": user}}, "user_id": user if "user_id" in ask.has else None}


def _only_some(ask: SurfaceRequest) -> None:
    """Parameters that only some providers have, and values that change nothing."""
    body = ask.body
    if ask.model.api == "anthropic" and not ask.passes:
        if cache_mark(body):
            ask.extra["cache_control"] = body.value["cache_control"]
    else:
        body.hint("cache_control")
    body.hint("service_tier", "auto")
    body.hint("speed", "standard")
    body.only("context_management", {}, {"edits": []}, _KEEP_ALL, why="would change the conversation")


_KEEP_ALL: Json = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
"""Sent by Claude Code; keeps everything."""
