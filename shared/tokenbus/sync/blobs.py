"""The deployment's blob store, from a synchronous client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Iterable

from tokenbus.blobs import DEFAULT_MEDIA_TYPE, BlobRef
from tokenbus.client.blobs import Blobs as AsyncBlobs
from tokenbus.client.client import Client as AsyncClient
from tokenbus.sync.loop_thread import LoopThread


class Blobs:
    """The deployment's blob store; see `tokenbus.Client.blobs`."""

    def __init__(self, loop: LoopThread, bus: AsyncClient) -> None:
        self._loop = loop
        self._bus = bus

    def put(self, content: bytes | Iterable[bytes], media_type: str = DEFAULT_MEDIA_TYPE) -> BlobRef:
        """Store content, whole or in pieces that are read as they are sent. Raises like `tokenbus.Client.blobs.put`."""
        pieces = content if isinstance(content, bytes) else _pieces(content)
        return self._loop.call(self._blobs.put(pieces, media_type))

    def get(self, blob_id: str) -> bytes:
        """Return a blob's whole content. Raises like `tokenbus.Client.blobs.get`."""
        return self._loop.call(self._blobs.get(blob_id))

    def chunks(self, blob_id: str) -> Generator[bytes]:
        """Yield a blob's content in pieces. Raises like `tokenbus.Client.blobs.chunks`."""
        return self._loop.each(lambda: self._blobs.chunks(blob_id))

    @property
    def _blobs(self) -> AsyncBlobs:
        return self._bus.blobs


async def _pieces(content: Iterable[bytes]) -> AsyncGenerator[bytes]:
    pieces = iter(content)
    # In a thread, because it may read a file.
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece
