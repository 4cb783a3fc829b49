"""The conversation as the input items of a Responses request: one list, in which calls and results are items too."""

from __future__ import annotations

import re
from typing import cast

import msgspec

from tokenbus.errors import RequestInvalid
from tokenbus.events.quirks import Quirks
from tokenbus.events.requests import (
    Base64Source,
    BlobSource,
    DocumentPart,
    ExtraPart,
    FileSource,
    ImagePart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolResultPart,
    UrlSource,
)
from tokenbus.providers.openai_responses.wire import fields
from tokenbus.providers.request.build import data_url, fitted_id
from tokenbus.providers.request.conversation import Spoken, own_extra, raw_json

_TOOL_ID = re.compile(r"[^\s]+")
_MAX_TOOL_ID = 64
_ITEM_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
CUSTOM_CALL = "custom_tool_call"

Json = dict[str, object]


class Input:
    """The items so far."""

    def __init__(self, quirks: Quirks, stored: bool) -> None:
        self.items: list[Json | msgspec.Raw] = []
        self._quirks = quirks
        self._stored = stored
        """The provider keeps responses: reasoning goes back by its id alone."""
        self._custom_calls: set[str] = set()
        """Calls of the latest message that were of custom tools."""

    def add(self, message: Spoken) -> None:
        """Append a message. Raises RequestInvalid."""
        match message.role:
            case "system":
                texts = [part.text for part in message.parts if isinstance(part, TextPart)]
                self.items.append({"role": "system", "content": "\n\n".join(texts)})
            case "user":
                self._user(message)
            case "assistant":
                self._assistant(message)
            case "tool":
                self.items += [self._result(part) for part in message.parts if isinstance(part, ToolResultPart)]

    def _user(self, message: Spoken) -> None:
        """One message; a provider's own items stand beside it."""
        parts: list[Json] = []
        for i, part in enumerate(message.parts):
            match part:
                case TextPart():
                    parts.append(text_part(part, self._quirks))
                case ImagePart():
                    parts.append(_image(part, self._quirks))
                case DocumentPart():
                    parts.append(_document(part, self._quirks))
                case ExtraPart():
                    if (raw := own_extra(part, "openai-responses", f"{message.where}.content[{i}]")) is not None:
                        self.items.append(raw)
                case _:
                    pass  # conversation() lets no other part into a user's message
        if parts:
            only_text = parts[0]["text"] if len(parts) == 1 and parts[0].keys() == {"type", "text"} else None
            self.items.append({"role": "user", "content": only_text or parts})

    def _assistant(self, message: Spoken) -> None:
        self._custom_calls = set()
        first = len(self.items)
        for i, part in enumerate(message.parts):
            where = f"{message.where}.content[{i}]"
            match part:
                case TextPart():
                    self._text(part, where, first)
                case ThinkingPart():
                    self._thinking(part, where, first)
                case ImagePart():
                    self._made(part)
                case ToolCallPart():
                    self._call(part, where)
                case ExtraPart():
                    if (raw := own_extra(part, "openai-responses", where)) is not None:
                        self.items.append(raw)
                case _:
                    pass  # conversation() lets no other part into an assistant's message

    def _text(self, part: TextPart, where: str, first: int) -> None:
        """A message of the model. Text of the same item is one message, as is text without any."""
        opaque = part.opaque or {}
        before = self._last(first, "message")
        item_id = _item_id(opaque, "msg")
        if before is not None and before.get("id") == item_id:
            if item_id:
                cast("list[Json]", before["content"]).append(_output_text(part.text, opaque, where))
            else:
                before["content"] = f"{before['content']}{part.text}"
            return
        said: Json = {"type": "message", "role": "assistant"}
        if item_id:
            said |= {"id": item_id, "status": "completed", "content": [_output_text(part.text, opaque, where)]}
        else:
            said["content"] = part.text
        self.items.append(said | _fields(opaque, where))

    def _thinking(self, part: ThinkingPart, where: str, first: int) -> None:
        """A reasoning where the API can use it: encrypted, stored, or in plain words at a vendor that wants them.

        The parts of one item, by its id, are one item again.
        """
        opaque = part.opaque or {}
        item_id = _item_id(opaque, "rs")
        encrypted = opaque.get("encrypted")
        said = self._last(first, "reasoning")
        if said is None or not item_id or said.get("id") != item_id:
            if not (encrypted or (self._stored and item_id) or self._quirks.reasoning_back):
                return
            fresh: Json = {"type": "reasoning", "summary": list[Json]()}
            said = fresh | {"id": item_id} if item_id else fresh
            self.items.append(said)
        if encrypted:
            said["encrypted_content"] = encrypted
        if part.text and (_fields(opaque, where) or not (encrypted or item_id)):
            content = cast("list[Json]", said.setdefault("content", list[Json]()))
            content.append({"type": "reasoning_text", "text": part.text})
        elif part.text:
            cast("list[Json]", said["summary"]).append({"type": "summary_text", "text": part.text})

    def _made(self, part: ImagePart) -> None:
        """An image that the model made: its own item, or, where another provider's model made it, one of the user."""
        item_id = _item_id(part.opaque or {}, "ig")
        if item_id and isinstance(part.source, Base64Source):
            said: Json = {"type": "image_generation_call", "id": item_id, "status": "completed"}
            self.items.append(said | {"result": part.source.data})
        else:
            self.items.append({"role": "user", "content": [_image(part, self._quirks)]})

    def _call(self, part: ToolCallPart, where: str) -> None:
        opaque = part.opaque or {}
        more = _fields(opaque, where)
        said: Json = {"call_id": _fitted(part.tool_id), "name": part.tool_name}
        if "type" in more:
            self._custom_calls.add(part.tool_id)
            said |= {"type": CUSTOM_CALL, "input": part.arguments}
        else:
            said |= {"type": "function_call", "arguments": part.arguments or "{}"}
        if item_id := _item_id(opaque, "ctc" if "type" in more else "fc"):
            said["id"] = item_id
        self.items.append({**more, **said})

    def _result(self, part: ToolResultPart) -> Json:
        kind = "custom_tool_call_output" if part.tool_id in self._custom_calls else "function_call_output"
        said: Json = {"type": kind, "call_id": _fitted(part.tool_id)}
        if isinstance(part.content, str):
            said["output"] = part.content
        else:
            said["output"] = [
                _image(inner, self._quirks) if isinstance(inner, ImagePart) else text_part(inner, self._quirks)
                for inner in part.content
            ]
        return said

    def _last(self, first: int, kind: str) -> Json | None:
        """The last item, where it is of this message and of this kind."""
        last = self.items[-1] if len(self.items) > first else None
        return last if isinstance(last, dict) and last.get("type") == kind else None


def text_part(part: TextPart, quirks: Quirks) -> Json:
    """Text of anybody but the model."""
    return {"type": "input_text", "text": part.text} | _cache(part.cache, quirks)


def _output_text(text: str, opaque: dict[str, str], where: str) -> Json:
    citations = opaque.get("citations") or "[]"
    annotations = raw_json(citations, f"{where}.opaque.citations")
    return {"type": "output_text", "text": text, "annotations": annotations}


def _image(part: ImagePart, quirks: Quirks) -> Json:
    assert not isinstance(part.source, BlobSource)  # conversation() lets none through
    if isinstance(part.source, FileSource):
        said: Json = {"type": "input_image", "detail": "auto", "file_id": part.source.file_id}
    else:
        said = {"type": "input_image", "detail": "auto", "image_url": data_url(part.source)}
    return said | _cache(part.cache, quirks)


def _document(part: DocumentPart, quirks: Quirks) -> Json:
    source = part.source
    assert not isinstance(source, BlobSource)
    said: Json = {"type": "input_file"}
    if isinstance(source, UrlSource):
        said["file_url"] = source.url
    elif isinstance(source, FileSource):
        said["file_id"] = source.file_id
    else:
        said |= {"filename": part.title or "document", "file_data": data_url(source)}
    return said | _cache(part.cache, quirks)


def _cache(marked: bool, quirks: Quirks) -> Json:
    return {"prompt_cache_breakpoint": {"mode": "explicit"}} if marked and quirks.cache_marks else {}


def _fields(opaque: dict[str, str], where: str) -> Json:
    """The further fields of an item. Raises RequestInvalid."""
    given = opaque.get("fields")
    if not given:
        return {}
    try:
        return dict(fields.decode(given))
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        raise RequestInvalid(f"{where}.opaque.fields", "it is no JSON object") from None


def _item_id(opaque: dict[str, str], kind: str) -> str | None:
    """The id that the provider gave the item, where the API takes it: others come from vendors that change them."""
    given = opaque.get("item_id", "")
    return given if given.startswith(f"{kind}_") and _ITEM_ID.fullmatch(given) else None


def _fitted(tool_id: str) -> str:
    return fitted_id(tool_id, _TOOL_ID, _MAX_TOOL_ID)
