"""Finds the media in a request, and builds the body with their bytes. Each has a location, used in errors."""

from __future__ import annotations

import re
import secrets
from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import TypeVar

import msgspec

from tokenbus import errors
from tokenbus.events.error_info import ErrorClass, ErrorInfo
from tokenbus.events.requests import ContentPart, DocumentPart, Generate, ImagePart, Message, Source, ToolResultPart
from tokenbus.providers.request.images import MASK
from tokenbus_services.media.blob_cache import Found

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
        done = 0
        for found in self._either.finditer(body):
            yield body[done : found.start()]
            coded, plain = found.groups()
            yield Mark(self._numbers[coded or plain], raw=coded is None)
            done = found.end()
        yield body[done:]


# The body is generated while it is sent. Only one piece of a blob is in memory at a time, never the whole body.


class Embedded(msgspec.Struct, frozen=True):
    """A blob embedded in a body."""

    where: str
    """Its location in the conversation."""
    blob_id: str
    found: Found
    raw: bool = False
    """Embed the raw bytes instead of base64."""

    @property
    def size(self) -> int:
        """Bytes that it occupies in the body."""
        return self.found.size if self.raw else base64_size(self.found.size)


class MediaBody:
    """Iterate over it once to send it. `size` is known in advance, in bytes; `aclose` releases open streams."""

    def __init__(self, pieces: Sequence[bytes | Embedded]) -> None:
        self._pieces = pieces
        self._sending: AsyncGenerator[bytes] | None = None
        self.size = sum(len(piece) if isinstance(piece, bytes) else piece.size for piece in pieces)

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Raises MediaFailed if a blob breaks off or has changed; the request is then cut off."""
        self._sending = self._all()
        return self._sending

    async def aclose(self) -> None:
        """Stop sending."""
        if self._sending is not None:
            await self._sending.aclose()

    async def _all(self) -> AsyncGenerator[bytes]:
        for piece in self._pieces:
            if isinstance(piece, bytes):
                yield piece
                continue
            try:
                async with aclosing(_encoded(piece)) as encoded:
                    async for data in encoded:
                        yield data
            except errors.BlobError as e:
                raise MediaFailed(e, piece.where) from e


async def _encoded(blob: Embedded) -> AsyncGenerator[bytes]:
    """Yield the blob in the encoding of the body. Raises BlobError. Base64 encodes three bytes at a time, so the
    remainder waits for the next piece.
    """
    size = 0
    over = b""
    async with aclosing(blob.found.pieces()) as pieces:
        async for piece in pieces:
            size += len(piece)
            if blob.raw:
                yield piece
                continue
            data = over + piece
            over = data[len(data) - len(data) % 3 :]
            if whole := data[: len(data) - len(over)]:
                yield b64encode(whole)
    if size != blob.found.size:  # the content length was already sent
        raise errors.BlobCorrupt(blob.blob_id, f"received {size} bytes, but the store reported {blob.found.size}")
    if over:
        yield b64encode(over)


def base64_size(size: int) -> int:
    """Number of base64 characters for this many bytes."""
    return (size + 2) // 3 * 4


class MediaFailed(Exception):
    """A media failure. ``error`` names the media at fault and says whether a retry may help."""

    def __init__(self, error: errors.BlobError, where: str) -> None:
        """``where``: the location of the media in the conversation."""
        super().__init__(f"{where}: {error.told or error}")
        self.error = ErrorInfo(
            code=error.code, kind=_kind(error), message=str(self), retryable=error.retryable, where=where
        )


def _kind(error: errors.BlobError) -> ErrorClass:
    match error:
        case errors.BlobNotFound() | errors.BlobRefused() | errors.BlobTooLarge():
            return "invalid_request"
        case errors.BlobUnauthorized():
            return "auth"
        case errors.BlobUnavailable():
            return "server"
        case _:
            return "internal"
