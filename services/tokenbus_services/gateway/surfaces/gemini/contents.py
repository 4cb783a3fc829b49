"""The contents of a Gemini request as messages of the bus. Pure."""

from __future__ import annotations

import re
from typing import Literal, cast

import msgspec

from tokenbus.events import requests
from tokenbus_services.gateway.problem import invalid, unsupported
from tokenbus_services.gateway.surfaces.contract import blob_path
from tokenbus_services.gateway.surfaces.fields import ITEMS, LAST_ITEMS, Fields, Json, unpack_opaque
from tokenbus_services.gateway.surfaces.hosted import originals

_FILES = ("gs://", "https://generativelanguage.googleapis.com/")
"""Beginnings of the names of files that the provider has already."""
_BLOB = re.compile(re.escape(blob_path("RUN", "ID")).replace("RUN", "[^/]+").replace("ID", "(sha256:[0-9a-f]{64})"))
_USERS = ("user", "function", "tool")
_OF_MODEL = ("functionCall", "thought", "thoughtSignature")
_OF_USER = ("functionResponse",)
_CALLED = {"functionCall", "function_call", "functionResponse", "function_response"}
_BESIDE = ("thought", "thoughtSignature", "thought_signature")
_STANDARD = str.maketrans("-_", "+/")


def messages_of(body: Fields) -> list[requests.Message]:
    """Read the conversation. Adjacent contents of one role become one message. Raises Refusal."""
    reader = _Reader()
    for content in body.each("contents"):
        reader.add(content)
    if not reader.messages:
        raise invalid("contents", "at least one content is required")
    return reader.messages


def system_of(body: Fields) -> list[requests.TextPart]:
    """Read the system instruction: a content with text parts. Raises Refusal."""
    given = body.json("systemInstruction")
    if given is None:
        return []
    content = Fields(given, "systemInstruction", body.reading, listed=True)
    content.take("role")  # has no meaning here
    parts: list[requests.TextPart] = []
    for part in content.each("parts"):
        text = part.needed("text", part.text("text"))
        parts += [requests.TextPart(text=text)] if text else []
    content.end()
    return parts


class _Reader:
    """Folds contents into messages, and finds the call of each response: clients may leave out the ids."""

    def __init__(self) -> None:
        self.messages: list[requests.Message] = []
        self._parts: list[requests.ContentPart] = []
        """Of the last message."""
        self._calls: list[tuple[str, str]] = []
        """Id and name of each call without a response."""
        self._count = 0

    def add(self, content: Fields) -> None:
        given = content.one_of("role", ("model", *_USERS))
        role: Literal["assistant", "user"] = "assistant" if given == "model" else "user"
        if not (self.messages and self.messages[-1].role == role):
            self._parts = []
            self.messages.append(requests.Message(role=role, content=self._parts))
        read = self._of_model if role == "assistant" else self._of_user
        before, last = 0, list[requests.ContentPart]()

        def one(part: Fields) -> bool:
            nonlocal before, last
            before, last = len(self._parts), self._parts[-1:]
            if (found := read(part)) is not None:
                if isinstance(found, requests.ToolCallPart | requests.ToolResultPart):
                    found = msgspec.structs.replace(found, extra=part.own("gemini"))
                self._parts.append(found)
            return True

        def whole(part: Json) -> bool | None:
            if (raw := _raw(part)) is None:
                return None
            self._parts[max(0, before - 1) :] = [*last, raw]  # without what was read of it
            return True

        content.each_read("parts", one, whole)
        if own := content.own("gemini"):
            message = self.messages[-1]
            extra: requests.Extra = {"gemini": {**(message.extra or {}).get("gemini", {}), **own["gemini"]}}
            self.messages[-1] = msgspec.structs.replace(message, extra=extra)

    def _of_model(self, part: Fields) -> requests.ContentPart | None:
        part.refuse("has no place in a content of the model", *_OF_USER)
        thought = part.flag("thought") or False
        if part.has("executableCode") or part.has("codeExecutionResult"):
            carried = unpack_opaque(part.text("thoughtSignature") or "")
            if carried is not None and {"item", "json"} == set(carried):
                part.clear()  # it stands for another API's item
                return next(iter(originals([carried])), None)
        opaque = _opaque(part.text("thoughtSignature"))
        if opaque:
            begun = (
                part.value.get("text") == ""
                and self._parts
                and isinstance(self._parts[-1], requests.TextPart | requests.ThinkingPart)
            )
            at = len(self._parts) - bool(begun)  # the end of a streamed text
            self._parts[at:at] = originals(_items(opaque.pop(ITEMS, "")))
            self._parts += originals(_items(opaque.pop(LAST_ITEMS, "")))
            opaque = opaque or None
        if called := part.fields("functionCall"):
            return self._call(called, opaque)
        if (data := next((name for name in ("inlineData", "fileData") if part.has(name)), None)) is not None:
            return self._media(part, data, opaque)
        if part.has("text") or opaque:
            return self._text(part.text("text") or "", opaque, thought=thought)
        return _unknown(part)

    def _media(self, part: Fields, name: str, opaque: dict[str, str] | None) -> requests.ContentPart | None:
        """An image of the model. A sound of another API's model is its transcript, which stands before it, with the
        id that its own provider knows.
        """
        given = part.peek(name)
        about = cast("Json", given) if isinstance(given, dict) else Json()
        is_sound = str(about.get("mimeType", about.get("mime_type"))).startswith("audio/")
        last = self._parts[-1] if self._parts else None
        if is_sound and (not part.reading.passes or "audio" in (opaque or {})):
            part.clear()
            if isinstance(last, requests.TextPart):
                self._parts[-1] = msgspec.structs.replace(last, opaque=opaque or last.opaque)
            else:
                part.reading.leave_out(part.path(name))
            return None
        media = _media(part)
        if not isinstance(media, requests.ImagePart):
            raise unsupported(part.path(f"{name}.mimeType"), "only images and sound of the model can be sent back")
        return msgspec.structs.replace(media, opaque=opaque)

    def _call(self, called: Fields, opaque: dict[str, str] | None) -> requests.ToolCallPart:
        name = called.needed("name", called.text("name"))
        tool_id = called.text("id") or f"call_{self._count}"
        self._count += 1
        self._calls.append((tool_id, name))
        arguments = msgspec.json.encode(called.json("args") or {}).decode()
        return requests.ToolCallPart(tool_id=tool_id, tool_name=name, arguments=arguments, opaque=opaque)

    def _text(self, text: str, opaque: dict[str, str] | None, *, thought: bool) -> requests.ContentPart | None:
        """A piece of a streamed text continues the last one, and a signature without text belongs to it."""
        kind = requests.ThinkingPart if thought else requests.TextPart
        last = self._parts[-1] if self._parts else None
        if isinstance(last, kind) and not last.opaque:
            self._parts[-1] = msgspec.structs.replace(last, text=last.text + text, opaque=opaque)
            return None
        return kind(text=text, opaque=opaque) if text or (thought and opaque) else None

    def _of_user(self, part: Fields) -> requests.ContentPart | None:
        part.refuse("has no place in a content of the user", *_OF_MODEL)
        if answered := part.fields("functionResponse"):
            return self._result(answered)
        if part.has("text"):
            text = part.text("text")
            return requests.TextPart(text=text) if text else None
        if part.has("inlineData") or part.has("fileData"):
            return _media(part)
        return _unknown(part)

    def _result(self, answered: Fields) -> requests.ToolResultPart:
        name = answered.needed("name", answered.text("name"))
        if not answered.reading.passes:
            answered.only("willContinue", False)
            answered.only("parts", [], why="is not supported: write the result into `response`")
            answered.only("scheduling", "SCHEDULING_UNSPECIFIED")
        content, is_error = _result_text(answered.json("response") or {})
        tool_id = answered.text("id")
        call = next((call for call in self._calls if call[0] == tool_id or (not tool_id and call[1] == name)), None)
        if call:
            self._calls.remove(call)
        return requests.ToolResultPart(
            tool_id=tool_id or (call[0] if call else name), tool_name=name, content=content, is_error=is_error
        )


def _raw(part: Json) -> requests.ContentPart | None:
    if _CALLED.intersection(part):
        return None  # the bus pairs calls and results
    kind = next((name for name in part if name not in _BESIDE), "part")
    return requests.ExtraPart(name=f"gemini.{kind}", json=msgspec.json.encode(part).decode())


def _unknown(part: Fields) -> None:
    """A part without content is skipped; one with content of an unknown kind is refused by name."""
    part.end()


def _opaque(signature: str | None) -> dict[str, str] | None:
    if not signature:
        return None
    return unpack_opaque(signature) or {"thought_signature": signature}


def _items(text: str) -> object:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return []


def _result_text(response: Json) -> tuple[str, bool]:
    """A response's text: its usual text field, or else the object as JSON."""
    match response:
        case {"output": str(text), **rest} if not rest:
            return text, False
        case {"error": str(text), **rest} if not rest:
            return text, True
        case _:
            return msgspec.json.encode(response).decode(), False


def _media(part: Fields) -> requests.ImagePart | requests.DocumentPart:
    part.refuse("is not supported by this gateway", "videoMetadata", "mediaResolution")
    inline = part.has("inlineData")
    name = "inlineData" if inline else "fileData"
    media = part.needed(name, part.fields(name))
    media.take("displayName")
    media_type = media.text("mimeType") or ""
    if inline:
        data = media.needed("data", media.text("data")).translate(_STANDARD)  # Google's clients send the URL-safe form
        source = requests.Base64Source(
            media_type=media.needed("mimeType", media_type or None), data=data + "=" * (-len(data) % 4)
        )
    else:
        uri = media.needed("fileUri", media.text("fileUri"))
        if blob := _BLOB.fullmatch(uri):
            source = requests.BlobSource(blob_id=blob[1], media_type=media_type)
        elif uri.startswith(_FILES):
            source = requests.FileSource(file_id=uri, media_type=media_type or None)
        else:
            source = requests.UrlSource(url=uri)
    kind = media_type.partition("/")[0].strip().lower()
    if kind in ("audio", "video"):
        raise unsupported(media.path("mimeType"), f"{kind} is not supported by this gateway")
    return requests.ImagePart(source=source) if kind == "image" else requests.DocumentPart(source=source)
