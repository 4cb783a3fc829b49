"""The conversation as the input items of a Responses request. Calls and results are items in the same list."""

from __future__ import annotations

import re
from typing import cast

import msgspec

from tokenbus.errors import RequestInvalid
from tokenbus.events.quirks import Quirks
from tokenbus.events.requests import (
    Base64Source,
    BlobSource,
    Cache,
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
from tokenbus.providers.request.build import data_url, deep_merged, fitted_id, with_own
from tokenbus.providers.request.conversation import Spoken, own_extra, raw_json

_TOOL_ID = re.compile(r"[^\s]+")
_MAX_TOOL_ID = 64
_ITEM_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")

Json = dict[str, object]


class Input:
    """Collects the input items."""

    def __init__(self, quirks: Quirks, stored: bool) -> None:
        self.items: list[Json | msgspec.Raw] = []
        self._quirks = quirks
        self._stored = stored
        """The provider stores responses, so reasoning is sent back by id only."""
        self._custom_calls: set[str] = set()
        """Custom-tool calls of the latest message."""

    def add(self, message: Spoken) -> None:
        """Append a message. Raises RequestInvalid."""
        first = len(self.items)
        self._add(message)
        if message.extra:
            of_message = (n for n in range(first, len(self.items)) if "role" in self._fields_of(n))
            for n in of_message:
                self.items[n] = deep_merged(self._fields_of(n), message.extra)

    def _fields_of(self, n: int) -> Json:
        item = self.items[n]
        return item if isinstance(item, dict) else {}

    def _add(self, message: Spoken) -> None:
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
        """Add one user message. Provider-specific items go next to it."""
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
                    pass  # conversation() allows no other part in a user message
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
                    pass  # conversation() allows no other part in an assistant message

    def _text(self, part: TextPart, where: str, first: int) -> None:
        """Add model text. Consecutive texts of the same item, or without an item, form one message."""
        opaque = part.opaque or {}
        before = self._last(first, "message")
        item_id = _item_id(opaque, "msg")
        more = _fields(opaque, where)
        if before is not None and before.get("id") == item_id and (item_id or before.get("phase") == more.get("phase")):
            if item_id:
                cast("list[Json]", before["content"]).append(_output_text(part.text, opaque, where))
            else:
                before["content"] = f"{before['content']}{part.text}"
            return
        payload: Json = {"type": "message", "role": "assistant"}
        if item_id:
            payload |= {"id": item_id, "status": "completed", "content": [_output_text(part.text, opaque, where)]}
        else:
            payload["content"] = part.text
        self.items.append(payload | more)

    def _thinking(self, part: ThinkingPart, where: str, first: int) -> None:
        """Add reasoning if the API can use it: encrypted, stored, or as plain text for vendors that want it.

        Parts with the same item id are merged into one item again.
        """
        opaque = part.opaque or {}
        item_id = _item_id(opaque, "rs")
        encrypted = opaque.get("encrypted")
        payload = self._last(first, "reasoning")
        if payload is None or not item_id or payload.get("id") != item_id:
            if not (encrypted or (self._stored and item_id) or self._quirks.reasoning_back):
                return
            fresh: Json = {"type": "reasoning", "summary": list[Json]()}
            payload = fresh | {"id": item_id} if item_id else fresh
            self.items.append(payload)
        if encrypted:
            payload["encrypted_content"] = encrypted
        if part.text and (_fields(opaque, where) or not (encrypted or item_id)):
            content = cast("list[Json]", payload.setdefault("content", list[Json]()))
            content.append({"type": "reasoning_text", "text": part.text})
        elif part.text:
            cast("list[Json]", payload["summary"]).append({"type": "summary_text", "text": part.text})

    def _made(self, part: ImagePart) -> None:
        """Add a model-generated image: as its own item, or as a user image if another provider's model made it."""
        item_id = _item_id(part.opaque or {}, "ig")
        if item_id and isinstance(part.source, Base64Source):
            payload: Json = {"type": "image_generation_call", "id": item_id, "status": "completed"}
            self.items.append(payload | {"result": part.source.data})
        else:
            self.items.append({"role": "user", "content": [_image(part, self._quirks)]})

    def _call(self, part: ToolCallPart, where: str) -> None:
        opaque = part.opaque or {}
        more = _fields(opaque, where)
        payload: Json = {"call_id": _fitted(part.tool_id), "name": part.tool_name}
        if part.free_text:
            self._custom_calls.add(part.tool_id)
            payload |= {"type": "custom_tool_call", "input": part.arguments}
        else:
            payload |= {"type": "function_call", "arguments": part.arguments or "{}"}
        if item_id := _item_id(opaque, "ctc" if part.free_text else "fc"):
            payload["id"] = item_id
        self.items.append(with_own({**more, **payload}, part.extra, "openai-responses"))

    def _result(self, part: ToolResultPart) -> Json:
        kind = "custom_tool_call_output" if part.tool_id in self._custom_calls else "function_call_output"
        payload: Json = {"type": kind, "call_id": _fitted(part.tool_id)}
        if isinstance(part.content, str):
            payload["output"] = part.content
        else:
            payload["output"] = [
                _image(inner, self._quirks) if isinstance(inner, ImagePart) else text_part(inner, self._quirks)
                for inner in part.content
            ]
        return with_own(payload, part.extra, "openai-responses")

    def _last(self, first: int, kind: str) -> Json | None:
        """The last item, if it belongs to this message and has this type."""
        last = self.items[-1] if len(self.items) > first else None
        return last if isinstance(last, dict) and last.get("type") == kind else None


def text_part(part: TextPart, quirks: Quirks) -> Json:
    """Input text: anything not written by the model."""
    payload: Json = {"type": "input_text", "text": part.text}
    return with_own(payload | _cache(part.cache, quirks), part.extra, "openai-responses")


def _output_text(text: str, opaque: dict[str, str], where: str) -> Json:
    citations = opaque.get("citations") or "[]"
    annotations = raw_json(citations, f"{where}.opaque.citations")
    return {"type": "output_text", "text": text, "annotations": annotations}


def _image(part: ImagePart, quirks: Quirks) -> Json:
    assert not isinstance(part.source, BlobSource)  # conversation() rejects these
    if isinstance(part.source, FileSource):
        source: Json = {"file_id": part.source.file_id}
    else:
        source = {"image_url": data_url(part.source)}
    payload: Json = {"type": "input_image", "detail": part.detail or "auto", **source}
    return with_own(payload | _cache(part.cache, quirks), part.extra, "openai-responses")


def _document(part: DocumentPart, quirks: Quirks) -> Json:
    source = part.source
    assert not isinstance(source, BlobSource)
    payload: Json = {"type": "input_file"}
    if isinstance(source, UrlSource):
        payload["file_url"] = source.url
    elif isinstance(source, FileSource):
        payload["file_id"] = source.file_id
    else:
        payload |= {"filename": part.title or "document", "file_data": data_url(source)}
    return with_own(payload | _cache(part.cache, quirks), part.extra, "openai-responses")


def _cache(mark: Cache, quirks: Quirks) -> Json:
    return {"prompt_cache_breakpoint": {"mode": "explicit"}} if mark and quirks.cache_marks else {}


def _fields(opaque: dict[str, str], where: str) -> Json:
    """Additional fields of an item. Raises RequestInvalid."""
    given = opaque.get("fields")
    if not given:
        return {}
    try:
        return dict(fields.decode(given))
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        raise RequestInvalid(f"{where}.opaque.fields", "not a JSON object") from None


def _item_id(opaque: dict[str, str], kind: str) -> str | None:
    """The provider's id of the item, if the API accepts it. Other ids come from vendors that change them."""
    given = opaque.get("item_id", "")
    return given if given.startswith(f"{kind}_") and _ITEM_ID.fullmatch(given) else None


def _fitted(tool_id: str) -> str:
    return fitted_id(tool_id, _TOOL_ID, _MAX_TOOL_ID)
