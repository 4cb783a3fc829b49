"""Turns tool results into what the model sees: verbatim if small, otherwise the beginning, with the whole in a blob.

If the blob store fails, the rest of a large result is lost, but the call still succeeds.
"""

from __future__ import annotations

import codecs
from base64 import b64encode
from collections.abc import AsyncIterator, Sequence

import msgspec
import structlog

from tokenbus.blobs import BlobRef, plain_media_type
from tokenbus.bus import process_clock
from tokenbus.errors import BlobError, BlobUnavailable
from tokenbus.events.frames import ResultImage
from tokenbus.tools import Image
from tokenbus_services.blobs.client import BlobLoader
from tokenbus_services.redaction.redactor import Redaction
from tokenbus_services.tools.tool_call import Text, ToolOutcome

_STORE_S = 30.0
"""Maximum time a result waits for the blob store, in addition to the call's own timeout."""

_log = structlog.stdlib.get_logger()


class Results:
    """Builds outcomes of at most ``limit`` bytes, including notes if there is room, with this process's secrets
    redacted.
    """

    def __init__(
        self, limit: int, blobs: BlobLoader | None, redact: Redaction | None = None, *, image_bytes: int = 0
    ) -> None:
        """``image_bytes``: maximum bytes of a result's images that the model sees."""
        self._limit = limit
        self._image_bytes = image_bytes
        self._blobs = blobs
        self._redact = redact or Redaction()

    async def text(self, result: Text) -> ToolOutcome:
        """Build the outcome of a complete text result."""
        # Lone surrogates cannot be encoded and become question marks.
        text = self._redact(result.text)
        content = text.encode(errors="replace")
        if len(content) <= self._limit:
            return ToolOutcome(content.decode())
        return await self._cut(text, _once(content), result.media_type)

    async def of(self, parts: Sequence[Text | Image]) -> Text | ToolOutcome:
        """Build the outcome of a Python tool's result: its images are stored, and shown to the model."""
        if len(parts) == 1 and isinstance(parts[0], Text):
            return parts[0]
        return await self.joined(
            [
                await self.blob(part.data, part.media_type) if isinstance(part, Image) else ToolOutcome(part.text)
                for part in parts
            ]
        )

    async def blob(self, content: bytes, media_type: str) -> ToolOutcome:
        """Store non-text content of any size in the blob store, and return a note. Images up to ``image_bytes``
        are also shown to the model.
        """
        content = self._redact.data(content)
        outcome = await self._cut(None, _once(content), media_type)
        if not is_shown(media_type) or len(content) > self._image_bytes:
            return outcome
        image = shown(content, media_type, outcome.blob_id)
        note = outcome.content if outcome.blob_id else f"[{len(content)} bytes of {media_type}]"
        return ToolOutcome(note, blob_id=outcome.blob_id, images=(image,))

    async def joined(self, parts: Sequence[ToolOutcome]) -> ToolOutcome:
        """Join several outcomes into one: their texts on separate lines, and their images."""
        if len(parts) == 1 and (parts[0].blob_id or parts[0].images):
            return parts[0]
        outcome = await self.text(Text("\n".join(part.content for part in parts)))
        images = [image for part in parts for image in part.images]
        return msgspec.structs.replace(outcome, images=within(images, self._image_bytes))

    async def stream(self, chunks: AsyncIterator[bytes], media_type: str, charset: str) -> ToolOutcome:
        """Build the outcome of a result that is still arriving, holding little more than the limit in memory.

        Bytes that are not text in this charset go to the blob store, in any size. Raises any exception of
        ``chunks``.
        """
        chunks = self._redact.chunks(chunks)
        image = is_shown(media_type)
        limit = max(self._limit, self._image_bytes) if image else self._limit
        head = bytearray()
        whole = True
        async for chunk in chunks:
            head += chunk
            if len(head) > limit:
                whole = False
                break
        if image and whole:
            return await self.blob(bytes(head), media_type)
        text = _decode(bytes(head), charset, whole=whole)
        if text is not None and whole:
            return await self.text(Text(text, media_type))
        return await self._cut(text, _chain(bytes(head), chunks), media_type)

    async def _cut(self, text: str | None, whole: AsyncIterator[bytes], media_type: str) -> ToolOutcome:
        """Store the whole result and show its beginning, or only a note if it is not text. Raises any exception of
        ``whole``.
        """
        try:
            ref = await self._keep(whole, media_type)
        except BlobError as e:
            _log.warning("tool_result_not_stored", code=e.code, problem=str(e))
            if text is None:
                return ToolOutcome(f"[{media_type}, not text; it could not be stored: {e.code}]", is_error=True)
            return ToolOutcome(self._beginning(text, f"[truncated; the whole result could not be stored: {e.code}]"))
        if text is None:
            return ToolOutcome(f"[{ref.size} bytes of {media_type}, stored as blob {ref.blob_id}]", blob_id=ref.blob_id)
        note = f"[truncated; the whole result has {ref.size} bytes and is stored as blob {ref.blob_id}]"
        return ToolOutcome(self._beginning(text, note), blob_id=ref.blob_id)

    async def _keep(self, whole: AsyncIterator[bytes], media_type: str) -> BlobRef:
        if self._blobs is None:
            raise BlobUnavailable("blobs", "there is no blob store")
        try:
            async with process_clock.timeout(_STORE_S):
                return await self._blobs.store(whole, media_type)
        except TimeoutError:
            raise BlobUnavailable("blobs", f"not stored within {_STORE_S:g} s") from None

    def _beginning(self, text: str, note: str) -> str:
        room = max(0, self._limit - len(note.encode()) - 1)
        # A partial character at the cut is dropped.
        return f"{text.encode(errors='replace')[:room].decode(errors='ignore')}\n{note}"


def _decode(content: bytes, charset: str, *, whole: bool) -> str | None:
    """Decode the text, without an incomplete last character; None if it is not text."""
    try:
        "".encode(charset)  # LookupError for codecs that are not text encodings, such as zlib
        return codecs.getincrementaldecoder(charset)().decode(content, final=whole)
    except (LookupError, ValueError):
        return None


async def _once(content: bytes) -> AsyncIterator[bytes]:
    yield content


async def _chain(head: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield head
    async for chunk in rest:
        yield chunk


# Images in tool results: decides which ones the model sees, in addition to the note in the text.

SHOWN_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")
"""The image types that all provider APIs accept."""


def is_shown(media_type: str) -> bool:
    """Whether models can view images of this type."""
    return plain_media_type(media_type) in SHOWN_TYPES


def shown(content: bytes, media_type: str, blob_id: str | None) -> ResultImage:
    """An image for the model: by its blob, or with its bytes if it is in none."""
    plain = plain_media_type(media_type)
    if blob_id:
        return ResultImage(plain, blob_id=blob_id, size_bytes=len(content))
    return ResultImage(plain, b64encode(content).decode())


def within(images: Sequence[ResultImage], limit: int) -> tuple[ResultImage, ...]:
    """Limit the images that the model sees to ``limit`` bytes in total, in order. The others are kept only if they are
    in a blob.
    """
    kept: list[ResultImage] = []
    for image in images:
        size = image.size_bytes or len(image.base64) * 3 // 4
        if size <= limit:
            limit -= size
            kept.append(image)
        elif image.blob_id:
            kept.append(ResultImage(image.media_type, blob_id=image.blob_id))
    return tuple(kept)
