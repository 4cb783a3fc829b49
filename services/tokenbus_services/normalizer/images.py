"""Images out of the stream and into the blob store, before their events are committed.

By content address, so that an upload which is made again changes nothing. The partition waits for it: a store that is
away costs a bounded time and then the blob, never the image, which stays in its event. Only a preview is left out then.
"""

from __future__ import annotations

import asyncio
import binascii
from base64 import b64decode
from collections.abc import Sequence

import msgspec
import structlog
from prometheus_client import CollectorRegistry, Counter

from tokenbus.blobs import BlobLoader
from tokenbus.core.pixels import in_blob
from tokenbus.errors import BlobError
from tokenbus.events.normalized import Extra, Image, Normalized
from tokenbus_services.blobs.patience import Patience

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

PATIENCE_S = 10.0
"""Longest that a batch waits for all of its images."""
AT_ONCE = 4
"""Uploads side by side: each holds an image decoded."""


class ImageKeeper:
    """Stores images that their fetchers did not. ``aclose`` gives its connections up."""

    def __init__(self, blobs: BlobLoader, registry: CollectorRegistry) -> None:
        self._blobs = blobs
        self._patience = Patience(blobs.store)
        self._kept = Counter(
            "tokenbus_images", "Generated images, previews included, by where they lie.", ["lies"], registry=registry
        )

    async def aclose(self) -> None:
        """Give up the connections."""
        await self._blobs.aclose()

    async def keep(self, images: Sequence[Image]) -> list[list[Normalized]]:
        """For each image what is told in its place: the same with its blob, or inline with a note that says why. Does
        not raise; takes `PATIENCE_S` at the most."""
        places = asyncio.Semaphore(AT_ONCE)
        until = asyncio.get_running_loop().time() + PATIENCE_S
        return await asyncio.gather(*(self._told(image, places, until) for image in images))

    async def _told(self, image: Image, places: asyncio.Semaphore, until: float) -> list[Normalized]:
        if image.blob_id:  # its fetcher stored it
            self._kept.labels("blob").inc()
            return [image]
        try:
            async with places:
                content = b64decode(image.base64, validate=True)
                ref = await self._patience.put(lambda: content, image.media_type, until=until)
        except BlobError as e:
            problem = str(e)
        except binascii.Error as e:
            problem = f"the image is no base64: {e}"
        else:
            self._kept.labels("blob").inc()
            return [in_blob(image, content, ref.blob_id)]
        self._kept.labels("inline" if image.final else "nowhere").inc()
        log.warning("image_not_stored", final=image.final, problem=problem)
        note = Extra("tokenbus.image_not_stored", msgspec.json.encode(problem).decode(), image.block)
        return [image, note] if image.final else [note]
