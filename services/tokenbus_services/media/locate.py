"""Finds the media in a request. Each has a location, used in errors and to replace its source."""

from __future__ import annotations

import re
import secrets
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec

from tokenbus.events.requests import (
    ContentPart,
    DocumentPart,
    Generate,
    ImagePart,
    Message,
    Source,
    ToolResultPart,
)
from tokenbus.providers.request.images import MASK

Media = ImagePart | DocumentPart
P = TypeVar("P", bound=msgspec.Struct)


def media_of(request: Generate) -> Iterator[tuple[str, Media]]:
    """Yield each image and document of the request with its location."""
    yield from media_in(request.messages, "messages")
    if request.images and request.images.mask:
        yield MASK, request.images.mask


def request_with(request: Generate, sources: Mapping[str, Source]) -> Generate:
    """The request with these sources substituted at these locations."""
    images = request.images
    if images and images.mask and MASK in sources:
        images = msgspec.structs.replace(images, mask=_shown(images.mask, MASK, sources))
    messages = with_sources(request.messages, "messages", sources)
    return msgspec.structs.replace(request, messages=messages, images=images)


def media_in(messages: Sequence[Message], root: str) -> Iterator[tuple[str, Media]]:
    """Yield each image and document with its location, such as ``messages[2].content[1]`` for the root ``messages``."""
    for i, message in enumerate(messages):
        if not isinstance(message.content, str):
            for j, part in enumerate(message.content):
                yield from _within(part, f"{root}[{i}].content[{j}]")


def own_media(messages: Sequence[Message], root: str) -> set[str]:
    """The locations of model-generated media."""
    return {
        where
        for i, message in enumerate(messages)
        if message.role == "assistant" and not isinstance(message.content, str)
        for j, part in enumerate(message.content)
        for where, _ in _within(part, f"{root}[{i}].content[{j}]")
    }


def with_sources(messages: list[Message], root: str, sources: Mapping[str, Source]) -> list[Message]:
    """The messages with these sources substituted at these locations."""
    touched = {where.partition(".")[0] for where in sources}
    return [
        _replaced(message, where, sources) if (where := f"{root}[{i}]") in touched else message
        for i, message in enumerate(messages)
    ]


def _within(part: ContentPart, where: str) -> Iterator[tuple[str, Media]]:
    if isinstance(part, ImagePart | DocumentPart):
        yield where, part
    elif isinstance(part, ToolResultPart) and not isinstance(part.content, str):
        for k, inner in enumerate(part.content):
            if isinstance(inner, ImagePart):
                yield f"{where}.content[{k}]", inner


def _replaced(message: Message, where: str, sources: Mapping[str, Source]) -> Message:
    assert not isinstance(message.content, str)
    content = [_part(part, f"{where}.content[{j}]", sources) for j, part in enumerate(message.content)]
    return msgspec.structs.replace(message, content=content)


def _part(part: ContentPart, where: str, sources: Mapping[str, Source]) -> ContentPart:
    if isinstance(part, ToolResultPart) and not isinstance(part.content, str):
        content = [_shown(inner, f"{where}.content[{k}]", sources) for k, inner in enumerate(part.content)]
        return msgspec.structs.replace(part, content=content)
    return _shown(part, where, sources)


def _shown(part: P, where: str, sources: Mapping[str, Source]) -> P:
    return msgspec.structs.replace(part, source=sources[where]) if where in sources else part


# Placeholders for blobs while a request is built, found again in the resulting body.

_DIGITS = 6
"""Digits of a placeholder's number. They make its length a multiple of three bytes, so its base64 needs no padding."""


class Mark(msgspec.Struct, frozen=True):
    """The position of a blob in a body."""

    number: int
    raw: bool
    """Insert the raw bytes instead of base64."""


class PlaceholderMarks:
    """The placeholders of one request, identified by number. They are unguessable to the request's authors, both as
    base64 and decoded.
    """

    def __init__(self) -> None:
        self._stem = f"blob-{secrets.token_hex(17)}".encode()  # 39 bytes
        in_base64 = b64encode(self._stem)
        # Digits only, so their base64 consists of letters and digits.
        coded = b"%b([0-9A-Za-z]{%d})" % (in_base64, _DIGITS * 4 // 3)
        self._either = re.compile(coded + b"|" + b"%b([0-9]{%d})" % (self._stem, _DIGITS))
        self._numbers: dict[bytes, int] = {}
        """By the characters after the stem, in either form."""

    def base64(self, number: int) -> str:
        """The placeholder of this number, for use as the data of a base64 source."""
        digits = b"%0*d" % (_DIGITS, number)
        self._numbers[digits] = self._numbers[b64encode(digits)] = number
        return b64encode(self._stem + digits).decode()

    def split(self, body: bytes) -> Iterator[bytes | Mark]:
        """Split the body at its placeholders."""
        done = 0
        for found in self._either.finditer(body):
            yield body[done : found.start()]
            coded, plain = found.groups()
            yield Mark(self._numbers[coded or plain], raw=coded is None)
            done = found.end()
        yield body[done:]
