"""Blob access for running turns: look up, stream and briefly cache small blobs in memory.

A run with several turns sends the same media with each turn, so recently used blobs are served from here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Generator
from contextlib import aclosing, contextmanager
from hashlib import sha256
from typing import Protocol, cast, runtime_checkable

import msgspec

from tokenbus.blobs import BlobLoader, BlobRef, BlobStreams, blob_id_of, parse_blob_id
from tokenbus.bus.liveness import beat
from tokenbus.errors import BlobCorrupt, BlobError, BlobUnavailable

_PIECE_BYTES = 64 * 2**10
_LARGEST_PART = 4
"""A blob larger than this fraction of the cache is not cached: it would evict all others."""

_CHECKED = 4096

Pieces = Callable[[], AsyncGenerator[bytes]]


class Found(msgspec.Struct, frozen=True):
    """A blob that exists."""

    size: int
    """Bytes."""
    media_type: str | None
    """From the store; None if the store does not report it."""
    pieces: Pieces
    """Starts reading the verified content from the beginning. Raises BlobError."""


@runtime_checkable
class _Checks(Protocol):
    """A loader whose store can verify content against the id itself."""

    async def check(self, blob_id: str) -> None: ...


@runtime_checkable
class _LongLeases(Protocol):
    """A loader whose store can keep a blob longer than a run."""

    async def lease_for(self, blob_id: str, seconds: float) -> None: ...


class RecentBlobs:
    """Caches blobs by id, up to ``limit`` bytes in memory, least recently used evicted first. For one event loop."""

    def __init__(self, loader: BlobLoader, limit: int) -> None:
        """Takes ownership of the loader and closes it."""
        self._loader = loader
        self._limit = limit
        self._kept: OrderedDict[str, tuple[bytes, str | None]] = OrderedDict()
        self._kept_bytes = 0
        self._coming_bytes = 0
        """Size of the blobs being read that will be cached."""
        self._checked: OrderedDict[str, None] = OrderedDict()
        """Ids of verified blobs."""

    @property
    def held_bytes(self) -> int:
        """Size of the cached blobs, including those being read into the cache."""
        return self._kept_bytes + self._coming_bytes

    async def find(self, blob_id: str) -> Found:
        """Look up a blob and extend its life by the maximum duration of a run. Raises BlobError."""
        await self.lease(blob_id)
        if kept := self._recent(blob_id):
            return _whole(*kept)
        loader = self._loader
        with _blob_errors():
            if isinstance(loader, BlobStreams):
                ref = await loader.head(blob_id)
                return Found(ref.size, ref.media_type, lambda: self._streamed(loader, ref))
            content = await loader.load(blob_id)
            if blob_id_of(content) != blob_id:
                raise BlobCorrupt(blob_id)
        self._keep(blob_id, content, None)
        return _whole(content, None)

    async def check(self, blob_id: str, found: Found) -> None:
        """Verify the blob's content against its id before it is used. Raises BlobError.

        Uses the store's own check if it has one; otherwise reads the content once. Recent results are remembered.
        """
        if blob_id in self._kept or blob_id in self._checked:
            return
        with _blob_errors():
            if isinstance(self._loader, _Checks):
                await self._loader.check(blob_id)
            else:
                hasher = sha256()
                async with aclosing(found.pieces()) as pieces:
                    async for piece in pieces:
                        hasher.update(piece)
                if hasher.hexdigest() != parse_blob_id(blob_id):
                    raise BlobCorrupt(blob_id)
        self._checked[blob_id] = None
        if len(self._checked) > _CHECKED:
            self._checked.popitem(last=False)

    async def lease(self, blob_id: str) -> None:
        """Extend the blob's life by the maximum duration of a run; no effect for stores without leases. Raises
        BlobError.
        """
        parse_blob_id(blob_id)
        if isinstance(self._loader, BlobStreams):
            with _blob_errors():
                await self._loader.lease(blob_id)

    async def lease_for(self, blob_id: str, seconds: float) -> None:
        """Extend the blob's life to this number of seconds, if the store can do that. Raises BlobError."""
        parse_blob_id(blob_id)
        if isinstance(self._loader, _LongLeases):
            with _blob_errors():
                await self._loader.lease_for(blob_id, seconds)

    async def store(self, content: bytes | AsyncIterable[bytes], media_type: str) -> str:
        """Store content for at least the maximum duration of a run, and return its id. Raises BlobError."""
        with _blob_errors():
            ref = await self._loader.store(content, media_type)
        await self.lease(ref.blob_id)
        return ref.blob_id

    async def aclose(self) -> None:
        """Close the loader."""
        await self._loader.aclose()

    async def _streamed(self, loader: BlobStreams, ref: BlobRef) -> AsyncGenerator[bytes]:
        stream = cast("AsyncGenerator[bytes]", loader.chunks(ref.blob_id))
        with _blob_errors(), self._gathering(ref) as gather:
            async with aclosing(stream):
                async for piece in stream:
                    gather(piece)
                    beat()
                    yield piece

    @contextmanager
    def _gathering(self, ref: BlobRef) -> Generator[Callable[[bytes], None]]:
        """Collect the pieces of a blob that is worth caching, and cache it once they are complete."""
        if not self._worth_keeping(ref.size) or self._coming_bytes + ref.size > self._limit:
            yield lambda piece: None
            return
        pieces: list[bytes] = []
        self._coming_bytes += ref.size
        self._make_room()
        try:
            yield pieces.append
        finally:
            self._coming_bytes -= ref.size
        self._keep(ref.blob_id, b"".join(pieces), ref.media_type)

    def _recent(self, blob_id: str) -> tuple[bytes, str | None] | None:
        if blob_id in self._kept:
            self._kept.move_to_end(blob_id)
        return self._kept.get(blob_id)

    def _worth_keeping(self, size: int) -> bool:
        return size * _LARGEST_PART <= self._limit

    def _keep(self, blob_id: str, content: bytes, media_type: str | None) -> None:
        if not self._worth_keeping(len(content)) or blob_id in self._kept:
            return
        self._kept[blob_id] = (content, media_type)
        self._kept_bytes += len(content)
        self._make_room()

    def _make_room(self) -> None:
        while self._kept and self.held_bytes > self._limit:
            _, (gone, _) = self._kept.popitem(last=False)
            self._kept_bytes -= len(gone)


@contextmanager
def _blob_errors() -> Generator[None]:
    """Convert other exceptions of a custom store to BlobUnavailable."""
    try:
        yield
    except BlobError:
        raise
    except Exception as e:
        raise BlobUnavailable("blobs.loader", f"{type(e).__name__}: {e}") from e


def _whole(content: bytes, media_type: str | None) -> Found:
    async def pieces() -> AsyncGenerator[bytes]:
        view = memoryview(content)
        for start in range(0, len(content), _PIECE_BYTES):
            yield bytes(view[start : start + _PIECE_BYTES])

    return Found(len(content), media_type, pieces)
