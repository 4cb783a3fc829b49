"""The blobs of running turns: found in the store, streamed from it, and kept in memory for a while where small.

A run of several turns sends the same media with each: what was sent lately comes from here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Generator
from contextlib import aclosing, contextmanager
from hashlib import sha256
from typing import Protocol, cast, runtime_checkable

import msgspec

from tokenbus.blobs import BlobLoader, BlobRef, BlobStreams, blob_id_of, parse_blob_id
from tokenbus.errors import BlobCorrupt, BlobError, BlobUnavailable

_PIECE_BYTES = 64 * 2**10
_LARGEST_PART = 4
"""A blob that takes more than this part of the cache is not kept: it would drive out all others."""

_CHECKED = 4096

Pieces = Callable[[], AsyncGenerator[bytes]]


class Found(msgspec.Struct, frozen=True):
    """A blob that is there."""

    size: int
    """Bytes."""
    media_type: str | None
    """As the store has it; None for a store that does not tell."""
    pieces: Pieces
    """Its content from the beginning, checked; for each reading anew. Raises BlobError."""


@runtime_checkable
class _Checks(Protocol):
    """A loader whose store compares content and id itself."""

    async def check(self, blob_id: str) -> None: ...


class RecentBlobs:
    """Blobs by id: at most ``limit`` bytes of them in memory, the longest unused go first. For one event loop."""

    def __init__(self, loader: BlobLoader, limit: int) -> None:
        """The loader is this object's to close."""
        self._loader = loader
        self._limit = limit
        self._kept: OrderedDict[str, tuple[bytes, str | None]] = OrderedDict()
        self._kept_bytes = 0
        self._coming_bytes = 0
        """Of blobs that are being read, and will be kept."""
        self._checked: OrderedDict[str, None] = OrderedDict()
        """Blobs whose content was found right."""

    @property
    def held_bytes(self) -> int:
        """What the cache takes, with what is on its way into it."""
        return self._kept_bytes + self._coming_bytes

    async def find(self, blob_id: str) -> Found:
        """The blob, which from now on lives for as long as a run may be open. Raises BlobError."""
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
        """See that the blob's content is what its id says, before anything is made of it. Raises BlobError.

        A store that can look for itself does so; of another the content is read once for it. Asked again soon, it is
        taken as it was.
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
        """Let the blob live for as long as a run may be open. A store without leases has its own rule. Raises
        BlobError."""
        parse_blob_id(blob_id)
        if isinstance(self._loader, BlobStreams):
            with _blob_errors():
                await self._loader.lease(blob_id)

    async def store(self, content: bytes | AsyncIterable[bytes], media_type: str) -> str:
        """Store it, to live for as long as a run may be open; the blob's id. Raises BlobError."""
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
                    yield piece

    @contextmanager
    def _gathering(self, ref: BlobRef) -> Generator[Callable[[bytes], None]]:
        """Takes the pieces of a blob that is worth keeping, and keeps it once they are all there."""
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
    """A store of somebody's own may raise what it likes; what is no BlobError is taken for a store that is away."""
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
