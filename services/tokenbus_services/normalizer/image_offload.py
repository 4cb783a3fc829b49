"""Moves images, sounds and large opaque data to the blob store before their events are committed.

Storage is content-addressed, so repeated uploads are harmless. The partition waits for uploads for a bounded time. If
the store is unavailable, an image or sound stays inline in its event; only previews are dropped. Opaque data always
stays in its event too, because the run's next turn needs it.
"""

from __future__ import annotations

import asyncio
from base64 import b64decode
from collections.abc import Sequence

import msgspec
import structlog
from prometheus_client import CollectorRegistry, Counter

from tokenbus.blobs import BlobLoader
from tokenbus.bus import process_clock
from tokenbus.core.image_header import in_blob
from tokenbus.core.run.blocks.block_table import NOT_STORED
from tokenbus.errors import BlobError
from tokenbus.events.frames import BusEvent
from tokenbus.events.normalized import Audio, Extra, Image, Normalized, Opaque
from tokenbus_services.blobs.client import StoreRetry

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

STORE_TIMEOUT_S = 10.0
"""Maximum time a batch waits for all of its images."""
LARGE_CHARS = 32 * 1024
"""Opaque data longer than this is also stored as a blob, which public events refer to."""
AT_ONCE = 4
"""Concurrent uploads: each holds a decoded image."""


def belongs_in_blob(event: BusEvent, *, images: bool) -> bool:
    """Whether the event is large opaque data, or an image or sound if ``images`` are offloaded."""
    if isinstance(event, Opaque):
        return event.name != "signature" and len(event.value) > LARGE_CHARS
    return images and isinstance(event, Image | Audio)


class ImageKeeper:
    """Stores images that their fetchers did not, sounds, and opaque data. Call `aclose` at the end."""

    def __init__(self, blobs: BlobLoader, registry: CollectorRegistry) -> None:
        self._blobs = blobs
        self._retry = StoreRetry(blobs.store)
        self._kept = Counter(
            "tokenbus_images", "Generated images, including previews, by location.", ["location"], registry=registry
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._blobs.aclose()

    async def keep(self, large: Sequence[Image | Audio | Opaque]) -> list[list[Normalized]]:
        """Return the events to emit in place of each: the same with its blob, or with its content and a note with the
        reason.

        Does not raise; takes at most `STORE_TIMEOUT_S`.
        """
        places = asyncio.Semaphore(AT_ONCE)
        until = process_clock.now() + STORE_TIMEOUT_S
        return await asyncio.gather(*(self._one(event, places, until) for event in large))

    async def _one(self, event: Image | Audio | Opaque, places: asyncio.Semaphore, until: float) -> list[Normalized]:
        match event:
            case Opaque():
                return await self._data(event, places, until)
            case Audio():
                return await self._sound(event, places, until)
            case Image():
                return await self._image(event, places, until)

    async def _sound(self, sound: Audio, places: asyncio.Semaphore, until: float) -> list[Normalized]:
        try:
            async with places:
                content = b64decode(sound.base64)
                ref = await self._retry.put(lambda: content, sound.media_type, until=until)
        except BlobError as e:
            log.warning("audio_not_stored", problem=str(e))
            note = msgspec.json.encode(e.told or str(e)).decode()
            return [sound, Extra("tokenbus.audio_not_stored", note, sound.block)]
        return [msgspec.structs.replace(sound, base64="", blob_id=ref.blob_id, size_bytes=len(content))]

    async def _data(self, data: Opaque, places: asyncio.Semaphore, until: float) -> list[Normalized]:
        try:
            async with places:
                ref = await self._retry.put(data.value.encode, "text/plain;charset=utf-8", until=until)
        except BlobError as e:
            log.warning("opaque_not_stored", name=data.name, characters=len(data.value), problem=str(e))
            return [data]
        return [msgspec.structs.replace(data, blob_id=ref.blob_id)]

    async def _image(self, image: Image, places: asyncio.Semaphore, until: float) -> list[Normalized]:
        if image.blob_id:  # already stored by its fetcher
            self._kept.labels("blob").inc()
            return [image]
        try:
            async with places:
                content = b64decode(image.base64, validate=True)
                ref = await self._retry.put(lambda: content, image.media_type, until=until)
        except BlobError as e:
            problem = str(e)
            told = e.told or problem
        except ValueError as e:  # binascii.Error, or ValueError for non-ASCII text
            problem = told = f"the image is not valid base64: {e}"
        else:
            self._kept.labels("blob").inc()
            return [in_blob(image, content, ref.blob_id)]
        self._kept.labels("inline" if image.final else "dropped").inc()
        log.warning("image_not_stored", final=image.final, problem=problem)
        note = Extra(NOT_STORED, msgspec.json.encode(told).decode(), image.block)
        return [note, image] if image.final else [note]  # the note first: it may be why the image ends its run
