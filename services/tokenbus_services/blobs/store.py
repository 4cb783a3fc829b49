"""Blobs in an object store: a local directory, memory, or anything S3-compatible, all through obstore.

One blob is one object, ``sha256/<first two digits>/<digest>/<media type>``. So a blob's address, media type, size
and age are all in its listing: no backend needs attributes (local files have none) and no second object can get
out of step with the first. The same content under two media types is two objects; the newest one answers.

An upload is written to an unnamed temporary file while it is hashed, and goes to the object store only when it is
whole and its address known, in one atomic put. So nothing of a cut upload ever reaches the store, and the
kernel frees the temporary file even after ``kill -9``. What a kill *during the put* can leave: on a local disk a
staged file, which `sweep` removes; on S3 parts of a multipart upload, for which the bucket wants a lifecycle rule.

A blob lives for ``ttl_s`` after it was last put, and longer while there is a lease on it (`leases`): whoever reads it
whole takes one, for a run needs it. `sweep` may run in several processes. Within one process it never
takes a blob that is being put again; across processes only one re-put between its last look and its delete.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import IO, TYPE_CHECKING
from weakref import WeakValueDictionary

import obstore
from obstore.store import AzureStore, GCSStore, LocalStore, ObjectStore, S3Store

from tokenbus.blobs import BlobRef, blob_id_from_digest, parse_blob_id, parse_media_type
from tokenbus.errors import (
    BlobCorrupt,
    BlobNotFound,
    BlobRefused,
    BlobTooLarge,
)
from tokenbus_services.blobs import backend, leases
from tokenbus_services.blobs.backend import listed, remove_staged, store_errors
from tokenbus_services.blobs.quota import Quota
from tokenbus_services.blobs.ranges import Part
from tokenbus_services.settings import BlobSettings, RetentionSettings

if TYPE_CHECKING:
    from obstore import GetOptions

_ROOT = "sha256"
_KEY = re.compile(rf"{_ROOT}/([0-9a-f]{{2}})/(\1[0-9a-f]{{62}})/([^/]+/[^/]+)")
_STAGED_STALE_S = 3600.0
_SPOOL_BYTES = 2**20
"""Uploads up to this stay in memory; larger ones are written to disk in pieces of this size."""
_READ_BYTES = 256 * 2**10
_PUTS_AT_ONCE = 8
"""A put holds a few parts of 5 MiB in memory."""
_KNOWN_LEASES = 10_000


def create(settings: BlobSettings, directory: Path, *, lease_s: float = RetentionSettings().open_run_s) -> BlobStore:
    """The store that the settings name, as `backend.opened` takes them. A lease is for ``lease_s``. Raises
    SettingsError."""
    objects = backend.opened(settings.url, directory)
    return BlobStore(
        objects,
        max_bytes=settings.max_bytes,
        ttl_s=settings.ttl_s,
        lease_s=lease_s,
        quota_bytes=settings.quota_bytes or None,
    )


class OpenBlob:
    """A blob found and opened for reading."""

    def __init__(self, ref: BlobRef, digest: str | None, read: AsyncIterator[bytes]) -> None:
        """``digest``: None for a part, which nothing can be checked by."""
        self.ref = ref
        self._digest = digest
        self._read = read

    async def chunks(self) -> AsyncIterator[bytes]:
        """The content, once. The last chunk comes only after the checksum of the whole was found right.

        Raises BlobCorrupt before it where the stored bytes are not the blob's, BlobUnavailable where the store fails.
        """
        hasher = sha256()
        held = b""
        with store_errors("read"):
            async for chunk in self._read:
                hasher.update(chunk)
                if held:
                    yield held
                held = chunk
        if self._digest not in {None, hasher.hexdigest()}:
            raise BlobCorrupt(self.ref.blob_id)
        if held:
            yield held


class BlobStore:
    """Puts, opens, leases and sweeps blobs. One object for a process; safe to use from many tasks."""

    def __init__(
        self,
        objects: ObjectStore,
        *,
        max_bytes: int,
        ttl_s: float,
        lease_s: float,
        quota_bytes: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``quota_bytes``: of all blobs, see `Quota`."""
        self.max_bytes = max_bytes
        self._objects = objects
        self._ttl_s = ttl_s
        self._lease_s = lease_s
        self._quota = Quota(quota_bytes)
        self._leased: dict[str, float] = {}
        """Leases that this process knows to be there: digest to end. Forgotten when there are many."""
        self._clock = clock
        self._puts = asyncio.Semaphore(_PUTS_AT_ONCE)
        self._locks = WeakValueDictionary[str, asyncio.Lock]()

    async def put(self, body: AsyncIterable[bytes], media_type: str, *, expected: str | None = None) -> BlobRef:
        """Store a body. The same content again is stored once and its lifetime begins anew.

        With ``expected``, a blob id, the content must have this address. Raises BlobTooLarge, BlobRefused,
        BlobQuotaExceeded, BlobStoreFull, BlobUnavailable, and what ``body`` raises; in all these cases nothing new can
        be read.
        """
        media_type = parse_media_type(media_type)
        wanted = None if expected is None else parse_blob_id(expected)
        with SpooledTemporaryFile[bytes](max_size=_SPOOL_BYTES) as spool:
            digest, size = await self._receive(body, spool)
            if wanted not in {None, digest}:
                raise BlobRefused("blob id", f"the content is {blob_id_from_digest(digest)}, not {expected}")
            key = f"{_ROOT}/{digest[:2]}/{digest}/{media_type}"
            spool.seek(0)
            if self._quota.wants_count:
                await self.sweep()  # here, for it takes the lock of each blob that it removes
            async with self._puts, self._lock(key):
                more = await self._reserve(key, size)
                try:
                    with store_errors("put"):
                        await obstore.put_async(self._objects, key, spool, max_concurrency=2)
                except BaseException:
                    self._quota.give_back(more)
                    raise
        return BlobRef(blob_id=blob_id_from_digest(digest), media_type=media_type, size=size)

    async def head(self, blob_id: str) -> BlobRef:
        """What is stored under this id. Raises BlobNotFound, BlobRefused for what is no id, BlobUnavailable."""
        return (await self._find(blob_id))[1]

    async def open(self, blob_id: str, part: Part | None = None) -> OpenBlob:
        """Open a blob, or a part of it, for reading. Raises BlobNotFound, BlobRefused for what is no id,
        BlobUnavailable."""
        key, ref = await self._find(blob_id)
        options: GetOptions = {} if part is None else {"range": (part.start, part.end)}
        with store_errors("open"):
            try:
                found = await obstore.get_async(self._objects, key, options=options)
            except FileNotFoundError:
                raise BlobNotFound(blob_id) from None
        digest = parse_blob_id(blob_id) if part is None else None
        return OpenBlob(ref, digest, found.stream(min_chunk_size=_READ_BYTES))

    async def verify(self, blob_id: str) -> None:
        """Read the blob and compare it with its id. Raises BlobCorrupt, BlobNotFound, BlobRefused for what is no id,
        BlobUnavailable."""
        async for _ in (await self.open(blob_id)).chunks():
            pass

    async def lease(self, blob_id: str) -> None:
        """Let the blob live for ``lease_s`` at least. Costs nothing while a lease lasts for half of that.

        Raises BlobNotFound, BlobRefused for what is no id, BlobUnavailable.
        """
        digest, now = parse_blob_id(blob_id), self._clock()
        if self._leased.get(digest, 0) >= now + self._lease_s / 2:
            return
        async with self._lock(digest):  # no sweep comes between the look and the lease
            await self._find(blob_id)
            until = await self._leased_until(digest)
            if until < now + self._lease_s / 2:
                until = math.ceil(now + self._lease_s)
                with store_errors("lease"):
                    await obstore.put_async(self._objects, leases.key_of(digest, until), b"")
        if len(self._leased) >= _KNOWN_LEASES:
            self._leased.clear()
        self._leased[digest] = until

    async def link(self, blob_id: str, *, seconds: float) -> str:
        """An url under which anyone can read the blob for so long, straight from the backend.

        Raises BlobNotFound, BlobRefused where the backend has no such urls, BlobUnavailable.
        """
        key, _ = await self._find(blob_id)
        if not isinstance(self._objects, S3Store | GCSStore | AzureStore):
            raise BlobRefused("link", "only S3, Google Cloud Storage and Azure give out urls of their own")
        with store_errors("link"):
            return await obstore.sign_async(self._objects, "GET", key, timedelta(seconds=seconds))

    async def sweep(self, now: float | None = None) -> int:
        """Remove the blobs that expired by ``now`` (Unix seconds) and that nobody leased, leases that ended, and staged
        files of killed writers; how many blobs.

        Raises BlobUnavailable.
        """
        limit = self._clock() if now is None else now
        removed = 0
        held = 0
        count = self._quota.begin_count()
        with store_errors("sweep"):
            async for batch in listed(self._objects, _ROOT):
                for found in batch:
                    if not _KEY.fullmatch(found["path"]):
                        continue
                    gone = self._expired(found["last_modified"].timestamp(), limit) and await self._remove_if_expired(
                        found["path"], limit
                    )
                    removed += gone
                    if gone:
                        self._quota.give_back(found["size"])
                    else:
                        held += found["size"]
            async for batch in listed(self._objects, leases.ROOT):
                for found in batch:
                    if (until := leases.until_of(found["path"])) is not None and until <= limit:
                        await self._remove(found["path"])
        self._quota.counted(count, held)
        if isinstance(self._objects, LocalStore) and self._objects.prefix is not None:
            await asyncio.to_thread(remove_staged, self._objects.prefix / _ROOT, limit - _STAGED_STALE_S)
        return removed

    async def check(self) -> None:
        """Returns if the store answers. Raises BlobUnavailable."""
        with store_errors("check"):
            await listed(self._objects, f"{_ROOT}/none").collect_async()

    async def _receive(self, body: AsyncIterable[bytes], spool: IO[bytes]) -> tuple[str, int]:
        """Write a body to the spool; its digest and size."""
        hasher = sha256()
        pending = bytearray()
        size = 0

        def write(piece: bytes) -> None:
            hasher.update(piece)
            with store_errors("upload"):
                spool.write(piece)

        async for chunk in body:
            size += len(chunk)
            if size > self.max_bytes:
                raise BlobTooLarge(size, self.max_bytes)
            pending += chunk
            if len(pending) >= _SPOOL_BYTES:
                await asyncio.to_thread(write, bytes(pending))
                pending.clear()
        write(bytes(pending))
        return hasher.hexdigest(), size

    async def _stored(self, digest: str) -> list[tuple[str, BlobRef, float]]:
        """Every object of this content, expired or not: its key, what it is, when it was last put."""
        with store_errors("list"):
            found = await listed(self._objects, f"{_ROOT}/{digest[:2]}/{digest}").collect_async()
        stored: list[tuple[str, BlobRef, float]] = []
        for entry in found:
            if match := _KEY.fullmatch(entry["path"]):
                ref = BlobRef(blob_id=blob_id_from_digest(digest), media_type=match[3], size=entry["size"])
                stored.append((entry["path"], ref, entry["last_modified"].timestamp()))
        return stored

    async def _find(self, blob_id: str) -> tuple[str, BlobRef]:
        """Key and description of the newest object that has not expired."""
        stored = await self._stored(parse_blob_id(blob_id))
        key, ref, put_at = max(stored, key=lambda entry: entry[2], default=("", None, 0.0))
        now = self._clock()
        if ref is None or (self._expired(put_at, now) and await self._leased_until(parse_blob_id(blob_id)) <= now):
            raise BlobNotFound(blob_id)
        return key, ref

    def _expired(self, put_at: float, now: float) -> bool:
        return put_at + self._ttl_s <= now

    def _lock(self, key: str) -> asyncio.Lock:
        """Held while an object is put or removed, so that a sweep cannot take what was just renewed."""
        return self._locks.setdefault(key, asyncio.Lock())

    async def _remove_if_expired(self, key: str, now: float) -> bool:
        """Remove an object that a listing showed expired, unless it was put again since."""
        digest = key.split("/")[2]
        async with self._lock(digest), self._lock(key):
            try:
                found = await obstore.head_async(self._objects, key)
            except FileNotFoundError:
                return False
            if not self._expired(found["last_modified"].timestamp(), now) or await self._leased_until(digest) > now:
                return False
            return await self._remove(key)

    async def _leased_until(self, digest: str) -> int:
        """The end of the longest lease on this content (Unix seconds); 0 where there is none."""
        with store_errors("lease"):
            found = await listed(self._objects, leases.prefix_of(digest)).collect_async()
        return leases.latest(entry["path"] for entry in found)

    async def _reserve(self, key: str, size: int) -> int:
        """Count a blob that is about to be put; how many bytes more it makes. Raises BlobQuotaExceeded."""
        if not self._quota.is_set:
            return 0
        with store_errors("put"):
            try:
                await obstore.head_async(self._objects, key)
                return 0
            except FileNotFoundError:
                pass
        self._quota.reserve(size)
        return size

    async def _remove(self, key: str) -> bool:
        with store_errors("delete"):
            try:
                await obstore.delete_async(self._objects, key)
            except FileNotFoundError:
                return False
        return True
