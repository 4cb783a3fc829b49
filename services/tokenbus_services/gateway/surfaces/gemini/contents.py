"""The contents of a Gemini request as messages of the bus. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec

from tokenbus.events.requests import (
    Base64Source,
    ContentPart,
    DocumentPart,
    ExtraPart,
    FileSource,
    ImagePart,
    Message,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolResultPart,
    UrlSource,
)
from tokenbus_services.gateway.problem import invalid, unsupported
from tokenbus_services.gateway.surfaces.fields import Fields, Json, unpack_opaque
from tokenbus_services.gateway.surfaces.hosted import originals

_FILES = ("gs://", "https://generativelanguage.googleapis.com/")
"""Beginnings of the names of files that the provider has already."""
_USERS = ("user", "function", "tool")
_OF_MODEL = ("functionCall", "thought", "thoughtSignature")
_OF_USER = ("functionResponse",)
_CALLED = {"functionCall", "function_call", "functionResponse", "function_response"}
_BESIDE = ("thought", "thoughtSignature", "thought_signature")
_STANDARD = str.maketrans("-_", "+/")


def messages_of(body: Fields) -> list[Message]:
    """Read the conversation. Adjacent contents of one role become one message. Raises Refusal."""
    reader = _Reader()
    for content in body.each("contents"):
        reader.add(content)
    if not reader.messages:
        raise invalid("contents", "at least one content is required")
    return reader.messages


def system_of(body: Fields) -> list[TextPart]:
    """Read the system instruction: a content with text parts. Raises Refusal."""
    content = body.fields("systemInstruction")
    if content is None:
        return []
    content.take("role")  # has no meaning here
    parts: list[TextPart] = []
    for part in content.each("parts"):
        text = part.needed("text", part.text("text"))
        parts += [TextPart(text=text)] if text else []
    return parts


class _Reader:
    """Folds contents into messages, and finds the call of each response: clients may leave out the ids."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._parts: list[ContentPart] = []
        """Of the last message."""
        self._calls: list[tuple[str, str]] = []
        """Id and name of each call without a response."""
        self._count = 0

    def add(self, content: Fields) -> None:
        given = content.one_of("role", ("model", *_USERS))
        role: Literal["assistant", "user"] = "assistant" if given == "model" else "user"
        if not (self.messages and self.messages[-1].role == role):
            self._parts = []
            self.messages.append(Message(role=role, content=self._parts))
        read = self._of_model if role == "assistant" else self._of_user
        before, last = 0, list[ContentPart]()

        def one(part: Fields) -> bool:
            nonlocal before, last
            before, last = len(self._parts), self._parts[-1:]
            if (found := read(part)) is not None:
                self._parts.append(found)
            return True

        def whole(part: Json) -> bool | None:
            if (raw := _raw(part)) is None:
                return None
            self._parts[max(0, before - 1) :] = [*last, raw]  # without what was read of it
            return True

        content.each_read("parts", one, whole)

    def _of_model(self, part: Fields) -> ContentPart | None:
        part.refuse("has no place in a content of the model", *_OF_USER)
        thought = part.flag("thought") or False
        if part.has("executableCode") or part.has("codeExecutionResult"):
            carried = unpack_opaque(part.text("thoughtSignature") or "")
            if carried is not None and {"item", "json"} == set(carried):
                part.clear()  # it stands for another API's item
                return next(iter(originals([carried])), None)
        opaque = _opaque(part.text("thoughtSignature"))
        if called := part.fields("functionCall"):
            return self._call(called, opaque)
        if part.has("inlineData"):
            image = _media(part)
            if not isinstance(image, ImagePart):
                raise unsupported(part.path("inlineData.mimeType"), "only images of the model can be sent back")
            return msgspec.structs.replace(image, opaque=opaque)
        if part.has("text") or opaque:
            return self._text(part.text("text") or "", opaque, thought=thought)
        part.refuse("has no place in a content of the model", "fileData")
        return _unknown(part)

    def _call(self, called: Fields, opaque: dict[str, str] | None) -> ToolCallPart:
        name = called.needed("name", called.text("name"))
        tool_id = called.text("id") or f"call_{self._count}"
        self._count += 1
        self._calls.append((tool_id, name))
        arguments = msgspec.json.encode(called.json("args") or {}).decode()
        return ToolCallPart(tool_id=tool_id, tool_name=name, arguments=arguments, opaque=opaque)

    def _text(self, text: str, opaque: dict[str, str] | None, *, thought: bool) -> ContentPart | None:
        """A piece of a streamed text continues the last one, and a signature without text belongs to it."""
        kind = ThinkingPart if thought else TextPart
        last = self._parts[-1] if self._parts else None
        if isinstance(last, kind) and not last.opaque:
            self._parts[-1] = msgspec.structs.replace(last, text=last.text + text, opaque=opaque)
            return None
        return kind(text=text, opaque=opaque) if text or (thought and opaque) else None

    def _of_user(self, part: Fields) -> ContentPart | None:
        part.refuse("has no place in a content of the user", *_OF_MODEL)
        if answered := part.fields("functionResponse"):
            return self._result(answered)
        if part.has("text"):
            text = part.text("text")
            return TextPart(text=text) if text else None
        if part.has("inlineData") or part.has("fileData"):
            return _media(part)
        return _unknown(part)

    def _result(self, answered: Fields) -> ToolResultPart:
        name = answered.needed("name", answered.text("name"))
        answered.only("willContinue", False)
        answered.only("parts", [], why="is not supported: write the result into `response`")
        answered.only("scheduling", "SCHEDULING_UNSPECIFIED")
        content, is_error = _result_text(answered.json("response") or {})
        tool_id = answered.text("id")
        call = next((call for call in self._calls if call[0] == tool_id or (not tool_id and call[1] == name)), None)
        if call:
            self._calls.remove(call)
        return ToolResultPart(
            tool_id=tool_id or (call[0] if call else name), tool_name=name, content=content, is_error=is_error
        )


def _raw(part: Json) -> ContentPart | None:
    if _CALLED.intersection(part):
        return None  # the bus pairs calls and results
    kind = next((name for name in part if name not in _BESIDE), "part")
    return ExtraPart(name=f"gemini.{kind}", json=msgspec.json.encode(part).decode())


def _unknown(part: Fields) -> None:
    """A part without content is skipped; one with content of an unknown kind is refused by name."""
    part.end()


def _opaque(signature: str | None) -> dict[str, str] | None:
    if not signature:
        return None
    return unpack_opaque(signature) or {"thought_signature": signature}


def _result_text(response: Json) -> tuple[str, bool]:
    """A response's text: its usual text field, or else the object as JSON."""
    match response:
        case {"output": str(text), **rest} if not rest:
            return text, False
        case {"error": str(text), **rest} if not rest:
            return text, True
        case _:
            return msgspec.json.encode(response).decode(), False


def _media(part: Fields) -> ImagePart | DocumentPart:
    part.refuse("is not supported by this gateway", "videoMetadata", "mediaResolution")
    inline = part.has("inlineData")
    name = "inlineData" if inline else "fileData"
    media = part.needed(name, part.fields(name))
    media.take("displayName")
    media_type = media.text("mimeType") or ""
    if inline:
        data = media.needed("data", media.text("data")).translate(_STANDARD)  # Google's clients send the URL-safe form
        source = Base64Source(
            media_type=media.needed("mimeType", media_type or None), data=data + "=" * (-len(data) % 4)
        )
    else:
        uri = media.needed("fileUri", media.text("fileUri"))
        of_provider = uri.startswith(_FILES)
        source = FileSource(file_id=uri, media_type=media_type or None) if of_provider else UrlSource(url=uri)
    kind = media_type.partition("/")[0].strip().lower()
    if kind in ("audio", "video"):
        raise unsupported(media.path("mimeType"), f"{kind} is not supported by this gateway")
    return ImagePart(source=source) if kind == "image" else DocumentPart(source=source)
