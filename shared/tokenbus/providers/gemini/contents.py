"""The conversation as the contents of a Gemini request: user and model turns made of parts."""

from __future__ import annotations

import re

import msgspec

from tokenbus.events import requests
from tokenbus.providers.request.build import deep_merged, with_own
from tokenbus.providers.request.conversation import Spoken, own_extra
from tokenbus.providers.response.json_decode import check_object

FOREIGN_SIGNATURE = "skip_thought_signature_validator"
"""Gemini 3 rejects a turn whose first call has no signature. This placeholder says that another model made the call:
https://ai.google.dev/gemini-api/docs/thought-signatures, "How do I transfer history from a different model".
"""

Json = dict[str, object]
Parts = list[Json | msgspec.Raw]


_MEDIA_TYPES = {
    "png": "image/png",
    "webp": "image/webp",
    "gif": "image/gif",
    "heic": "image/heic",
    "jpg": "image/jpeg",
    "jpeg": "image/jpeg",
    "pdf": "application/pdf",
    "txt": "text/plain",
    "md": "text/markdown",
    "csv": "text/csv",
    "html": "text/html",
}
_SUFFIX = re.compile(r"[^?#]*\.(\w+)(?:[?#].*)?", re.DOTALL)


class Contents:
    """Collects the turns. ``sign_calls``: the model rejects calls without a signature."""

    def __init__(self, *, sign_calls: bool) -> None:
        self.turns: list[Json] = []
        self._sign_calls = sign_calls
        self._parts: Parts = []
        """Parts of the latest turn."""
        self._calls: list[requests.ToolCallPart] = []
        """Calls of the latest model message that have no result yet."""

    def add(self, message: Spoken) -> None:
        """Append a message. Raises RequestInvalid."""
        if message.role == "tool":
            parts = self._results(message)
        elif message.role == "assistant":
            parts = self._model(message)
        else:
            candidates = [self._user(part, f"{message.where}.content[{i}]") for i, part in enumerate(message.parts)]
            parts = [part for part in candidates if part is not None]
        if not parts:
            return
        role = "model" if message.role == "assistant" else "user"
        if not (self.turns and self.turns[-1]["role"] == role):
            self._parts = []
            self.turns.append({"role": role, "parts": self._parts})
        self._parts += parts
        if message.extra:
            self.turns[-1] = deep_merged(self.turns[-1], message.extra) | {"parts": self._parts}

    def _user(self, part: requests.ContentPart, where: str) -> Json | msgspec.Raw | None:
        match part:
            case requests.TextPart():
                return with_own({"text": part.text}, part.extra, "gemini")
            case requests.ImagePart() | requests.DocumentPart():
                return with_own(_media(part.source), part.extra, "gemini")
            case requests.ExtraPart():
                return own_extra(part, "gemini", where)
            case _:
                return None  # conversation() allows no other part in a user message

    def _model(self, message: Spoken) -> Parts:
        parts: Parts = []
        calls: list[Json] = []
        self._calls = [part for part in message.parts if isinstance(part, requests.ToolCallPart)]
        for i, part in enumerate(message.parts):
            where = f"{message.where}.content[{i}]"
            match part:
                case requests.TextPart():
                    parts.append(with_own({"text": part.text} | _signature(part.opaque), part.extra, "gemini"))
                case requests.ThinkingPart():
                    # Thought text is for people; the model recognizes its thoughts only by their signature.
                    if signature := _signature(part.opaque):
                        parts.append({"text": part.text, "thought": True} | signature)
                case requests.ImagePart():
                    image = _media(part.source) | _signature(part.opaque)
                    parts.append(with_own(image, part.extra, "gemini"))
                case requests.ToolCallPart():
                    calls.append(self._call(part))
                    parts.append(calls[-1])
                case requests.ExtraPart():
                    if (raw := own_extra(part, "gemini", where)) is not None:
                        parts.append(raw)
                case _:
                    pass  # conversation() allows no other part in an assistant message
        if self._sign_calls and calls and not any("thoughtSignature" in call for call in calls):
            calls[0]["thoughtSignature"] = FOREIGN_SIGNATURE
        return parts

    def _call(self, part: requests.ToolCallPart) -> Json:
        called: Json = {"name": part.tool_name} | _own_id(part) | {"args": arguments_of(part)}
        return with_own({"functionCall": called} | _signature(part.opaque), part.extra, "gemini")

    def _results(self, message: Spoken) -> Parts:
        """Tool results, followed by the images in them: not all models accept images inside a result."""
        results: Parts = []
        images: Parts = []
        for part in message.parts:
            if not isinstance(part, requests.ToolResultPart):
                continue
            call = next(call for call in self._calls if call.tool_id == part.tool_id)  # conversation() guarantees it
            self._calls.remove(call)
            content = [requests.TextPart(text=part.content)] if isinstance(part.content, str) else part.content
            text = "\n".join(inner.text for inner in content if isinstance(inner, requests.TextPart))
            result: Json = {"name": call.tool_name, "response": {"error" if part.is_error else "output": text}}
            results.append(with_own({"functionResponse": result | _own_id(call)}, part.extra, "gemini"))
            seen = [inner for inner in content if isinstance(inner, requests.ImagePart)]
            shown = [with_own(_media(image.source), image.extra, "gemini") for image in seen]
            if shown:
                images.append({"text": f"Images of the result of {call.tool_name}:"})
                images += shown
        return results + images


def arguments_of(call: requests.ToolCallPart) -> Json | msgspec.Raw:
    """A call's arguments. Google's APIs accept only objects; the model sees what it wrote, next to the error result."""
    try:
        check_object(call.arguments or "{}")
        return msgspec.Raw(call.arguments or "{}")
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return {"invalid_arguments": call.arguments}


def _own_id(call: requests.ToolCallPart) -> Json:
    """The provider's own call id. Other ids mean nothing to it; without an id, it matches by name and order."""
    own = (call.opaque or {}).get("item_id")
    return {"id": own} if own else {}


def _signature(opaque: dict[str, str] | None) -> Json:
    signature = (opaque or {}).get("thought_signature")
    return {"thoughtSignature": signature} if signature else {}


def _media(source: requests.Source) -> Json:
    """Media inlined in the request or referred to by URL. A media type that the URL does not show is not sent: the API
    finds it, and a wrong one is an error.
    """
    assert not isinstance(source, requests.BlobSource)  # conversation() rejects these
    if isinstance(source, requests.Base64Source):
        return {"inlineData": {"mimeType": source.media_type, "data": source.data}}
    if isinstance(source, requests.FileSource):
        return _file(source.file_id, source.media_type)
    return _file(source.url, media_type_of(source))


def media_type_of(source: requests.UrlSource) -> str | None:
    """The media type of what a URL names; None: the URL does not show it."""
    found = _SUFFIX.fullmatch(source.url)
    return source.media_type or (_MEDIA_TYPES.get(found[1].lower()) if found else None)


def _file(uri: str, media_type: str | None) -> Json:
    return {"fileData": ({"mimeType": media_type} if media_type else {}) | {"fileUri": uri}}
