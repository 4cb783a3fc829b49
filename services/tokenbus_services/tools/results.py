"""From what a tool gave to what the model sees: as it is while small; otherwise its beginning, and the whole as a blob.

A blob store that fails costs the rest of a large result, never the call.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncIterator, Sequence
from typing import cast

import msgspec
import structlog

from tokenbus.blobs import BlobRef
from tokenbus.errors import BlobError, BlobUnavailable, ToolFailure
from tokenbus.tools import Image
from tokenbus_services.blobs.client import BlobLoader
from tokenbus_services.redaction import Redaction
from tokenbus_services.tools.images import is_shown, shown, within
from tokenbus_services.tools.tool_call import Text, ToolOutcome

_STORE_S = 30.0
"""Longest that a result waits for the blob store, beyond the time of the call itself."""

_log = structlog.stdlib.get_logger()


async def outcome_of(tool: str, value: object, results: Results) -> ToolOutcome | Text:
    """What a Python tool returned: an image, or a list with images in it, is shown; anything else becomes text.

    Raises ToolFailure.
    """
    several = _several(value)
    if not any(isinstance(one, Image) for one in several):
        return as_text(tool, value)
    parts: list[ToolOutcome] = []
    for one in several:
        is_image = isinstance(one, Image)
        parts.append(await results.blob(one.data, one.media_type) if is_image else ToolOutcome(as_text(tool, one).text))
    return await results.joined(parts)


def _several(value: object) -> Sequence[object]:
    return cast("Sequence[object]", value) if isinstance(value, list | tuple) else [value]


def as_text(tool: str, value: object) -> Text:
    """Text as it is, None as empty text, all else as JSON. Raises ToolFailure."""
    if value is None or isinstance(value, str):
        return Text(value or "")
    try:
        return Text(msgspec.json.encode(value).decode(), "application/json")
    except (TypeError, ValueError, RecursionError) as e:
        raise ToolFailure(tool, "bad_result", f"the tool returned what JSON cannot hold: {e}") from None


class Results:
    """Makes outcomes of at most ``limit`` bytes, notes included where there is room for them; without secrets of this
    process, which an endpoint or a careless tool may tell."""

    def __init__(
        self, limit: int, blobs: BlobLoader | None, redact: Redaction | None = None, *, image_bytes: int = 0
    ) -> None:
        """``image_bytes``: most bytes of a result's images that the model is shown."""
        self._limit = limit
        self._image_bytes = image_bytes
        self._blobs = blobs
        self._redact = redact or Redaction()

    async def text(self, result: Text) -> ToolOutcome:
        """The outcome for a result at hand."""
        # What is no character (half of a surrogate pair) could not travel: it becomes a question mark.
        text = self._redact(result.text)
        content = text.encode(errors="replace")
        if len(content) <= self._limit:
            return ToolOutcome(content.decode())
        return await self._cut(text, _once(content), result.media_type)

    async def blob(self, content: bytes, media_type: str) -> ToolOutcome:
        """A note in place of what is no text; the content goes to the blob store whatever its size. An image of at most
        ``image_bytes`` is shown to the model as well."""
        content = self._redact.data(content)
        outcome = await self._cut(None, _once(content), media_type)
        if not is_shown(media_type) or len(content) > self._image_bytes:
            return outcome
        image = shown(content, media_type, outcome.blob_id)
        note = outcome.content if outcome.blob_id else f"[{len(content)} bytes of {media_type}]"
        return ToolOutcome(note, blob_id=outcome.blob_id, images=(image,))

    async def joined(self, parts: Sequence[ToolOutcome]) -> ToolOutcome:
        """Several as one result: their texts on lines of their own, and their images."""
        if len(parts) == 1 and (parts[0].blob_id or parts[0].images):
            return parts[0]
        outcome = await self.text(Text("\n".join(part.content for part in parts)))
        images = [image for part in parts for image in part.images]
        return msgspec.structs.replace(outcome, images=within(images, self._image_bytes))

    async def stream(self, chunks: AsyncIterator[bytes], media_type: str, charset: str) -> ToolOutcome:
        """The outcome for a result that still arrives; at most a little over the limit of it is held in memory.

        Bytes that are no text in this charset go to the blob store whatever their size. Raises what ``chunks`` raises.
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
        """Keep the whole, show the beginning; without one, only a note. Raises what ``whole`` raises."""
        try:
            ref = await self._keep(whole, media_type)
        except BlobError as e:
            _log.warning("tool_result_not_kept", code=e.code, problem=str(e))
            if text is None:
                return ToolOutcome(f"[{media_type}, not text, that could not be kept: {e.code}]", is_error=True)
            return ToolOutcome(self._beginning(text, f"[cut here; the whole result could not be kept: {e.code}]"))
        if text is None:
            return ToolOutcome(f"[{ref.size} bytes of {media_type}, kept as blob {ref.blob_id}]", blob_id=ref.blob_id)
        note = f"[cut here; the whole result has {ref.size} bytes and is kept as blob {ref.blob_id}]"
        return ToolOutcome(self._beginning(text, note), blob_id=ref.blob_id)

    async def _keep(self, whole: AsyncIterator[bytes], media_type: str) -> BlobRef:
        if self._blobs is None:
            raise BlobUnavailable("blobs", "there is no blob store")
        try:
            async with asyncio.timeout(_STORE_S):
                return await self._blobs.store(whole, media_type)
        except TimeoutError:
            raise BlobUnavailable("blobs", f"not stored within {_STORE_S:g} s") from None

    def _beginning(self, text: str, note: str) -> str:
        room = max(0, self._limit - len(note.encode()) - 1)
        # A character that the cut went through is dropped.
        return f"{text.encode(errors='replace')[:room].decode(errors='ignore')}\n{note}"


def _decode(content: bytes, charset: str, *, whole: bool) -> str | None:
    """The text, without a last character that is not all there yet; None where this is no text."""
    try:
        "".encode(charset)  # LookupError for a codec that is not about text, such as zlib
        return codecs.getincrementaldecoder(charset)().decode(content, final=whole)
    except (LookupError, ValueError):
        return None


async def _once(content: bytes) -> AsyncIterator[bytes]:
    yield content


async def _chain(head: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield head
    async for chunk in rest:
        yield chunk
