"""The input of a Responses request as messages of the bus. Pure.

Items of the model that follow one another (reasoning, text, calls) become one message of it, and outputs of calls one
message of tools.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, cast

import msgspec

from tokenbus.events import requests
from tokenbus_services.gateway.problem import invalid, unsupported
from tokenbus_services.gateway.surfaces.fields import Fields
from tokenbus_services.gateway.surfaces.hosted import originals
from tokenbus_services.gateway.surfaces.openai_responses.items import Carried, of_field, opened
from tokenbus_services.gateway.surfaces.openai_responses.parts import ANSWER, REQUEST, of_bus

ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_INPUTS = {"function_call": "arguments", "custom_tool_call": "input"}
"""Calls, each with the field of its input."""
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_HOSTED = ("web_search_call", "file_search_call", "code_interpreter_call", "mcp_call")
"""Items that may stand for those of another API's provider, which they then carry."""
_Read = tuple[str, list[requests.ContentPart]]
_KINDS = ("message", *_INPUTS, *_OUTPUTS, "reasoning")


def messages_of(body: Fields) -> list[requests.Message]:
    """Read `input`. Raises Refusal."""
    value = body.needed("input", body.peek("input"))
    if isinstance(value, str):
        body.take("input")
        return [requests.Message(role="user", content=value)]
    reader = _Reader()
    for role, parts in body.each_read("input", reader.read, reader.raw):
        reader.add(role, parts)
    if not reader.messages:
        raise invalid("input", "must have at least one item")
    return [msgspec.structs.replace(each, content=_plain(each.content)) for each in reader.messages]


def in_namespace(space: str, name: str) -> str:
    """The name on the bus of a tool that is in a namespace."""
    return f"{space}__{name}"


class _Reader:
    """Collects the messages, item by item."""

    def __init__(self) -> None:
        self.messages: list[requests.Message] = []
        self._tools: dict[str, str] = {}
        self._hosted: dict[str, str] = {}
        """The provider's own ids of what it asked, by those under which clients were asked."""

    def raw(self, item: dict[str, Any]) -> _Read | None:
        """An item of the provider's own, which goes back as it is; None for one that must be understood here."""
        kind = item.get("type") or "message"
        if kind == "item_reference" or kind in (*_INPUTS, *_OUTPUTS):
            return None  # the bus pairs calls and results
        if kind == "reasoning" and opened(str(item.get("encrypted_content"))):
            return None  # it is sealed here
        part = requests.ExtraPart(name=f"openai-responses.{kind}", json=msgspec.json.encode(item).decode())
        return ("user" if kind == "message" and item.get("role") != "assistant" else "assistant"), [part]

    def read(self, item: Fields) -> _Read:
        """The role and the parts of an item. Raises Refusal."""
        if of_bus(item.value):
            item.take_rest()
            return self._of_bus(item.value)
        if item.peek("type") in _HOSTED and (parts := originals(_carried(item).items)):
            item.take_rest()
            return "assistant", [*parts]
        kind = item.one_of("type", _KINDS) or "message"
        item.take("id")
        item.one_of("status", ("in_progress", "completed", "incomplete"))
        carried = _carried(item)
        match kind:
            case "function_call" | "custom_tool_call":
                name = item.needed("name", item.text("name"))
                call_id = item.needed("call_id", item.text("call_id"))
                arguments = item.needed(_INPUTS[kind], item.text(_INPUTS[kind]))
                if space := item.text("namespace"):
                    name = in_namespace(space, name)
                self._tools[call_id] = name
                free = kind == "custom_tool_call"
                extra = item.own("openai-responses")
                part = requests.ToolCallPart(
                    tool_id=call_id, tool_name=name, arguments=arguments, free_text=free, extra=extra, **carried.fields
                )
                return "assistant", [part]
            case "function_call_output" | "custom_tool_call_output":
                return "tool", [self._result(item)]
            case "reasoning":
                return "assistant", [_reasoning(item)]
            case _:
                return _message(item, carried)

    def add(self, role: str, parts: list[requests.ContentPart]) -> None:
        """Add to the conversation: what the model says in a row, and its tools, is one message."""
        if not parts:
            return
        if [type(part) for part in parts] == [requests.ToolCallPart, requests.ToolResultPart]:
            self.add("assistant", parts[:1])
            self.add("tool", parts[1:])
            return
        last = self.messages[-1] if self.messages else None
        if role in ("assistant", "tool") and last and last.role == role and isinstance(last.content, list):
            last.content.extend(parts)
        else:
            self.messages.append(requests.Message(role=cast("Any", role), content=parts))

    def _of_bus(self, item: dict[str, Any]) -> _Read:
        """A request for leave, its answer, or the call that was allowed, as a response from here had them. The provider
        gets back what it asked itself, with the answer.
        """
        match item["type"]:
            case "mcp_approval_request":
                carried: Any = item.get("tokenbus")
                with suppress(msgspec.ValidationError):
                    for each in of_field(carried).items or []:
                        if each.get("item") == REQUEST and (name := _id_in(each.get("json", ""))):
                            self._hosted[item["id"]] = name
                            return "assistant", [requests.ExtraPart(name=REQUEST, json=each["json"])]
                return "assistant", []
            case "mcp_approval_response":
                if (name := self._hosted.get(item["approval_request_id"])) is None:
                    return "assistant", []
                kept = {key: value for key, value in item.items() if key in ("type", "approve", "reason")}
                answer = msgspec.json.encode({**kept, "approval_request_id": name}).decode()
                return "assistant", [requests.ExtraPart(name=ANSWER, json=answer)]
            case _:
                call_id, name = f"call_{item.get('id')}", str(item.get("name"))
                error = item.get("error")
                failure = cast("dict[str, object]", error) if isinstance(error, dict) else {}
                said = str(failure.get("content", "") if failure else item.get("output") or "")
                call = requests.ToolCallPart(
                    tool_id=call_id, tool_name=name, arguments=str(item.get("arguments") or "")
                )
                result = requests.ToolResultPart(
                    tool_id=call_id, tool_name=name, content=said, is_error=error is not None
                )
                return "assistant", [call, result]

    def _result(self, item: Fields) -> requests.ToolResultPart:
        call_id = item.needed("call_id", item.text("call_id"))
        output = item.needed("output", item.peek("output"))
        item.take("name")
        content: str | list[requests.TextPart | requests.ImagePart]
        if isinstance(output, str):
            item.take("output")
            content = output
        else:
            content = []
            for part in item.each("output"):
                at, read = part.path("type"), _content(part, "tool")
                if not isinstance(read, requests.TextPart | requests.ImagePart):
                    raise unsupported(at, "an output may have texts and images only")
                content.append(read)
        name, extra = self._tools.get(call_id), item.own("openai-responses")
        return requests.ToolResultPart(tool_id=call_id, content=content, tool_name=name, extra=extra)


def _id_in(json: str) -> str:
    with suppress(msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        found: object = msgspec.json.decode(json, type=dict[str, Any]).get("id")
        return found if isinstance(found, str) else ""
    return ""


def _message(item: Fields, carried: Carried) -> _Read:
    role = ROLES[item.needed("role", item.one_of("role", tuple(ROLES)))]
    item.take("phase")
    content = item.needed("content", item.peek("content"))
    parts: list[requests.ContentPart] = []
    if isinstance(content, str):
        item.take("content")
        parts = [requests.TextPart(text=content)]
    else:
        for part in item.each("content"):
            parts.append(_content(part, role))
    if role == "assistant":
        parts = [msgspec.structs.replace(each, **carried.fields) for each in parts]
    return role, parts


def _content(part: Fields, role: str) -> requests.ContentPart:
    kinds = ("output_text", "refusal", "input_text") if role == "assistant" else _INPUT
    kind = part.needed("type", part.one_of("type", kinds))
    if kind == "refusal":
        return requests.TextPart(text=part.needed("refusal", part.text("refusal")))
    if kind == "output_text":
        part.take("annotations")
        part.take("logprobs")
    read = _media(part, kind)
    if part.peek("detail") == "auto":
        part.take("detail")
    if part.reading.passes:  # of other roles the whole item goes as it is, if anything of it is unread
        return msgspec.structs.replace(read, extra=part.own("openai-responses")) if role in ("user", "tool") else read
    part.hint("detail")
    return msgspec.structs.replace(read, cache=part.take("prompt_cache_breakpoint") is not None)


def _media(part: Fields, kind: str) -> requests.TextPart | requests.ImagePart | requests.DocumentPart:
    if kind == "input_image":
        return requests.ImagePart(source=_source(part, "image_url", "image_url"))
    if kind == "input_file":
        return requests.DocumentPart(title=part.text("filename"), source=_source(part, "file_url", "file_data"))
    return requests.TextPart(text=part.needed("text", part.text("text")))


_INPUT = ("input_text", "input_image", "input_file")


def _source(part: Fields, url_field: str, data_field: str) -> requests.Source:
    """Where the media are: a provider's file, inline, or at a URL."""
    if file_id := part.text("file_id"):
        return requests.FileSource(file_id=file_id)
    at = part.path(data_field)
    data = part.text(data_field)
    if data is not None and (data.startswith("data:") or data_field != url_field):
        return _inline(data, at)
    return requests.UrlSource(url=part.needed(url_field, data if data_field == url_field else part.text(url_field)))


def _inline(data: str, at: str) -> requests.Base64Source:
    head, comma, base64 = data.partition(",")
    media_type = head.removeprefix("data:").removesuffix(";base64")
    if not (comma and head.startswith("data:") and head.endswith(";base64") and media_type):
        raise invalid(at, "must be a data URL with base64: data:TYPE;base64,…")
    return requests.Base64Source(media_type=media_type, data=base64)


def _reasoning(item: Fields) -> requests.ThinkingPart:
    text = _texts(item, "summary") + _texts(item, "content")
    sealed = item.text("encrypted_content")
    # Another server's encrypted reasoning is of no use here: the bus drops unsigned thinking, with a note.
    carried = (opened(sealed) if sealed else None) or Carried()
    return requests.ThinkingPart(text=text, signature=carried.signature, **carried.fields)


def _texts(item: Fields, name: str) -> str:
    texts: list[str] = []
    for part in item.each(name):
        part.one_of("type", ("summary_text", "reasoning_text"))
        texts.append(part.needed("text", part.text("text")))
    return "".join(texts)


def _carried(item: Fields) -> Carried:
    at = item.path("tokenbus")
    try:
        return of_field(item.json("tokenbus"))
    except msgspec.ValidationError as e:
        raise invalid(at, str(e)) from None


def _plain(content: str | list[requests.ContentPart]) -> str | list[requests.ContentPart]:
    """A single text without anything else as a string."""
    match content:
        case [requests.TextPart(text=text, cache=False, opaque=None, opaque_blobs=None, extra=None)]:
            return text
        case _:
            return content
