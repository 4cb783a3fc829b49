"""Gives answers the bytes of images and sounds in the blob store, for protocols that have no address for them."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

import msgspec
import structlog

from tokenbus.blobs import BlobLoader
from tokenbus.errors import BlobError
from tokenbus.events.public import AudioRef, BlockComplete, ImagePreview, ImageRef, PublicEvent
from tokenbus_services.net.web_socket import FairShare

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

LOAD_TIMEOUT_S = 20.0
AT_ONCE = 4
"""Blobs that are loaded at once, by all answers of a gateway."""
Media = TypeVar("Media", AudioRef, ImageRef)


class InlineMedia:
    """Loads media for answers. An answer holds what it got until it ends, and all of them no more than ``room``.

    A blob that finds no room, or that the store does not give, stays the reference that it is: surfaces send its
    address or its id.
    """

    def __init__(self, blobs: BlobLoader, room: FairShare) -> None:
        self._blobs = blobs
        self._room = room
        self._places = asyncio.Semaphore(AT_ONCE)

    async def filled(self, events: AsyncGenerator[PublicEvent], owner: str | None) -> AsyncGenerator[PublicEvent]:
        """The same events, with bytes beside the ids of blobs. ``owner``: the client's key."""
        held = _Held(self._room, owner)
        try:
            async with aclosing(events):
                async for event in events:
                    yield await self._fill(event, held)
        finally:
            held.release()

    async def _fill(self, event: PublicEvent, held: _Held) -> PublicEvent:
        match event:
            case BlockComplete(audio=AudioRef() as audio):
                return msgspec.structs.replace(event, audio=await self._loaded(audio, held))
            case BlockComplete(kind="image", image=ImageRef() as image) | ImagePreview(image=image):
                return msgspec.structs.replace(event, image=await self._loaded(image, held))
            case _:
                return event

    async def _loaded(self, media: Media, held: _Held) -> Media:
        if media.base64 is not None or not (media.blob_id and media.size_bytes and held.take(media.size_bytes)):
            return media
        try:
            async with self._places, asyncio.timeout(LOAD_TIMEOUT_S):
                content = await self._blobs.load(media.blob_id)
        except (BlobError, TimeoutError) as e:
            log.warning("media_not_loaded", blob=media.blob_id, problem=str(e) or "it took too long")
            return media
        return msgspec.structs.replace(media, base64=b64encode(content).decode())


class _Held:
    """The bytes that one answer holds."""

    def __init__(self, room: FairShare, owner: str | None) -> None:
        self._room = room
        self._owner = owner
        self._size = 0

    def take(self, size: int) -> bool:
        taken = self._room.take(self._owner, size)
        self._size += size if taken else 0
        return taken

    def release(self) -> None:
        if self._size:
            self._room.give_back(self._owner, self._size)
            self._size = 0
