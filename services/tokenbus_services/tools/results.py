"""From what a tool gave to what the model sees: as it is while small; otherwise its beginning, and the whole as a blob.

A blob store that fails costs the rest of a large result, never the call.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncIterator

import msgspec
import structlog

from tokenbus.blobs import BlobRef
from tokenbus.errors import BlobError, BlobUnavailable, ToolFailure
from tokenbus_services.blobs.client import BlobLoader
from tokenbus_services.tools.calls import Text, ToolOutcome

_STORE_S = 30.0
"""Longest that a result waits for the blob store, beyond the time of the call itself."""

_log = structlog.stdlib.get_logger()


def as_text(tool: str, value: object) -> Text:
    """What a Python tool returned: text as it is, None as empty text, all else as JSON. Raises ToolFailure."""
    if value is None or isinstance(value, str):
        return Text(value or "")
    try:
        return Text(msgspec.json.encode(value).decode(), "application/json")
    except (TypeError, ValueError, RecursionError) as e:
        raise ToolFailure(tool, "bad_result", f"the tool returned what JSON cannot hold: {e}") from None


class Results:
    """Makes outcomes of at most ``limit`` bytes, notes included where there is room for them."""

    def __init__(self, limit: int, blobs: BlobLoader | None) -> None:
        self._limit = limit
        self._blobs = blobs

    async def text(self, result: Text) -> ToolOutcome:
        """The outcome for a result at hand."""
        # What is no character (half of a surrogate pair) could not travel: it becomes a question mark.
        content = result.text.encode(errors="replace")
        if len(content) <= self._limit:
            return ToolOutcome(content.decode())
        return await self._cut(result.text, _once(content), result.media_type)

    async def blob(self, content: bytes, media_type: str) -> ToolOutcome:
        """A note in place of what is no text; the content goes to the blob store whatever its size."""
        return await self._cut(None, _once(content), media_type)

    async def stream(self, chunks: AsyncIterator[bytes], media_type: str, charset: str) -> ToolOutcome:
        """The outcome for a result that still arrives; at most a little over the limit of it is held in memory.

        Bytes that are no text in this charset go to the blob store whatever their size. Raises what ``chunks`` raises.
        """
        head = bytearray()
        whole = True
        async for chunk in chunks:
            head += chunk
            if len(head) > self._limit:
                whole = False
                break
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
