"""Restores opaque data of earlier turns from the blob store (`opaque_blobs`) to where the provider expects it.

Opaque data are optional: a value that is gone or too large is left out with a note. Only if the store is temporarily
away does the attempt end, to be retried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing

import msgspec

from tokenbus.errors import BlobError
from tokenbus.events.quirks import ApiName
from tokenbus.events.requests import ContentPart, ImagePart, Message, TextPart, ThinkingPart, ToolCallPart
from tokenbus_services.intake.unasked_media import CallInput
from tokenbus_services.media.blob_cache import RecentBlobs
from tokenbus_services.media.body import MediaFailed

MOST_BYTES = 16 * 2**20
"""Maximum bytes of all values of one turn."""
AT_ONCE = 8

_Holding = TextPart | ThinkingPart | ImagePart | ToolCallPart


def blobs_named(messages: list[Message]) -> Iterator[str]:
    """Yield the ids of all blobs that hold opaque data of these messages."""
    for message in messages:
        for part in message.content if isinstance(message.content, list) else ():
            if isinstance(part, _Holding) and part.opaque_blobs:
                yield from part.opaque_blobs.values()


async def with_opaque_blobs(turn: CallInput, api: ApiName, blobs: RecentBlobs) -> CallInput:
    """Return the turn with its opaque data loaded; data of other APIs are not loaded. Raises MediaFailed."""
    if not any(True for _ in blobs_named([*turn.request.messages, *turn.history])):
        return turn
    loading = _Loading(api, blobs)
    messages, history = await asyncio.gather(
        loading.all(turn.request.messages, "messages"), loading.all(turn.history, "history")
    )
    request = msgspec.structs.replace(turn.request, messages=messages)
    return CallInput(request, history, (*turn.notes, *loading.notes))


class _Loading:
    def __init__(self, api: ApiName, blobs: RecentBlobs) -> None:
        self.notes: list[str] = []
        self._api = api
        self._blobs = blobs
        self._bytes = 0
        self._at_once = asyncio.Semaphore(AT_ONCE)

    async def all(self, messages: list[Message], root: str) -> list[Message]:
        return await asyncio.gather(*(self._message(m, f"{root}[{i}]") for i, m in enumerate(messages)))

    async def _message(self, message: Message, where: str) -> Message:
        if isinstance(message.content, str):
            return message
        parts = [await self._part(part, f"{where}.content[{j}]") for j, part in enumerate(message.content)]
        return msgspec.structs.replace(message, content=parts)

    async def _part(self, part: ContentPart, where: str) -> ContentPart:
        if not isinstance(part, _Holding) or not part.opaque_blobs:
            return part
        opaque = dict(part.opaque or {})
        if opaque.get("api", self._api) == self._api:
            for name, blob_id in part.opaque_blobs.items():
                value = await self._value(blob_id, f"{where}.opaque_blobs.{name}")
                if value is not None:
                    opaque[name] = value
        return msgspec.structs.replace(part, opaque=opaque, opaque_blobs=None)

    async def _value(self, blob_id: str, where: str) -> str | None:
        try:
            async with self._at_once:
                found = await self._blobs.find(blob_id)
                self._bytes += found.size
                if self._bytes > MOST_BYTES:
                    self.notes.append(f"{where}: left out, for together they have more than {MOST_BYTES} bytes")
                    return None
                async with aclosing(found.pieces()) as pieces:
                    return b"".join([piece async for piece in pieces]).decode()
        except UnicodeDecodeError:
            self.notes.append(f"{where}: left out, because the blob is not text")
        except BlobError as e:
            if e.retryable:
                raise MediaFailed(e, where) from e
            self.notes.append(f"{where}: left out: {e}")
        return None
