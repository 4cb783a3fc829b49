"""Blobs in an object store: a local directory, memory, or any S3-compatible store, all through obstore.

One blob is one object, ``sha256/<first two digits>/<digest>/<media type>``, so address, media type, size and age are
all in its listing: no backend needs attributes (local files have none), and no second object can get out of sync. The
same content under two media types is two objects; the newest one is served.

An upload is written to an unnamed temporary file while it is hashed, and goes to the object store in one atomic put
once it is complete and its address is known. So nothing of a truncated upload reaches the store, and the kernel frees
the temporary file even after ``kill -9``. A kill *during the put* can leave a staged file on a local disk, which
`sweep` removes, and parts of a multipart upload on S3, for which the bucket needs a lifecycle rule.

A blob lives for ``ttl_s`` after it was last put, and longer while it has a lease (`leases`). Reading it whole takes a
lease, because a run needs it. `sweep` may run in several processes. Within one process it never removes a blob that is
being put again; across processes only one that is put again between its last check and its delete.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
from datetime import timedelta
from hashlib import sha256
from tempfile import SpooledTemporaryFile
from typing import IO, TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

import obstore
from obstore.store import AzureStore, GCSStore, LocalStore, ObjectStore, S3Store

from tokenbus.blobs import BlobRef, blob_id_from_digest, parse_blob_id, parse_media_type
from tokenbus.errors import BlobCorrupt, BlobNotFound, BlobQuotaExceeded, BlobRefused, BlobTooLarge
from tokenbus_services.blobs.backend import listed, remove_staged, store_errors
from tokenbus_services.settings import BlobSettings, RetentionSettings

if TYPE_CHECKING:
    from obstore import GetOptions

_ROOT = "sha256"
_KEY = re.compile(rf"{_ROOT}/([0-9a-f]{{2}})/(\1[0-9a-f]{{62}})/([^/]+/[^/]+)")
_STAGED_STALE_S = 3600.0
_SPOOL_BYTES = 2**20
"""Uploads up to this size stay in memory; larger ones are written to disk in pieces of this size."""
_READ_BYTES = 256 * 2**10
_PUTS_AT_ONCE = 8
"""A put holds a few parts of 5 MiB in memory."""
_KNOWN_LEASES = 10_000


def create(
    settings: BlobSettings,
    objects: ObjectStore,
    *,
    lease_s: float = RetentionSettings().open_run_s,
    longest_lease_s: float = 0.0,
) -> BlobStore:
    """Create the store configured by the settings. A lease lasts ``lease_s``, or as long as it is asked for, up to
    ``longest_lease_s``.
    """
    return BlobStore(
        objects,
        max_bytes=settings.max_bytes,
        ttl_s=settings.ttl_s,
        lease_s=lease_s,
        longest_lease_s=longest_lease_s,
        quota_bytes=settings.quota_bytes or None,
    )


class BlobStore:
    """Stores, reads, leases and sweeps blobs. One object per process; safe for concurrent use."""

    def __init__(
        self,
        objects: ObjectStore,
        *,
        max_bytes: int,
        ttl_s: float,
        lease_s: float,
        longest_lease_s: float = 0.0,
        quota_bytes: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``longest_lease_s``: bound of what `lease` may be asked for. ``quota_bytes``: limit of all blobs, see
        `Quota`.
        """
        self.max_bytes = max_bytes
        self.longest_lease_s = max(lease_s, longest_lease_s)
        self._objects = objects
        self._ttl_s = ttl_s
        self._lease_s = lease_s
        self._quota = Quota(quota_bytes)
        self._leased: dict[str, float] = {}
        """Leases known to this process, by digest. Cleared when there are many."""
        self._clock = clock
        self._puts = asyncio.Semaphore(_PUTS_AT_ONCE)
        self._locks = WeakValueDictionary[str, asyncio.Lock]()

    async def put(self, body: AsyncIterable[bytes], media_type: str, *, expected: str | None = None) -> BlobRef:
        """Store a body. Storing the same content again keeps one copy and restarts its lifetime.

        With ``expected``, a blob id, the content must have this address. Raises BlobTooLarge, BlobRefused,
        BlobQuotaExceeded, BlobStoreFull, BlobUnavailable, and any exception of ``body``; in all these cases nothing new
        becomes readable.
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
                await self.sweep()  # before taking locks, because it locks each blob that it removes
            async with self._puts, self._lock(key):
                more = await self._reserve(key, size)
                try:
                    with store_errors("put"):
                        await obstore.put_async(self._objects, key, spool, max_concurrency=2)
                except BaseException:
                    self._quota.release(more)
                    raise
        return BlobRef(blob_id=blob_id_from_digest(digest), media_type=media_type, size=size)

    async def head(self, blob_id: str) -> BlobRef:
        """Return the metadata of a blob. Raises BlobNotFound, BlobRefused for an invalid id, BlobUnavailable."""
        return (await self._find(blob_id))[1]

    async def open(self, blob_id: str, part: ByteRange | None = None) -> OpenBlob:
        """Open a blob, or a part of it, for reading. Raises BlobNotFound, BlobRefused for an invalid id,
        BlobUnavailable.
        """
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
        """Read the blob and verify it against its id. Raises BlobCorrupt, BlobNotFound, BlobRefused for an invalid id,
        BlobUnavailable.
        """
        async for _ in (await self.open(blob_id)).chunks():
            pass

    async def lease(self, blob_id: str, *, seconds: float | None = None) -> None:
        """Keep the blob for at least half of ``seconds``, normally all of them; None: of ``lease_s``. Costs nothing
        while a lease lasts that long.

        Raises BlobNotFound, BlobRefused for an invalid id, BlobUnavailable.
        """
        lease_s = self._lease_s if seconds is None else min(seconds, self.longest_lease_s)
        digest, now = parse_blob_id(blob_id), self._clock()
        if self._leased.get(digest, 0) >= now + lease_s / 2:
            return
        async with self._lock(digest):  # no sweep between the check and the lease
            await self._find(blob_id)
            until = await self._leased_until(digest)
            if until < now + lease_s / 2:
                until = math.ceil(now + lease_s)
                with store_errors("lease"):
                    await obstore.put_async(self._objects, lease_key(digest, until), b"")
        if len(self._leased) >= _KNOWN_LEASES:
            self._leased.clear()
        self._leased[digest] = until

    async def delete(self, blob_id: str) -> None:
        """Remove the content, under all its media types, and its leases.

        Raises BlobNotFound, BlobRefused for an invalid id, BlobUnavailable.
        """
        digest = parse_blob_id(blob_id)
        stored = await self._stored(digest)
        async with self._lock(digest):
            for key, ref, _ in stored:
                async with self._lock(key):
                    if await self._remove(key):
                        self._quota.release(ref.size)
            with store_errors("delete"):
                leases = await listed(self._objects, leases_of(digest)).collect_async()
            for lease in leases:
                await self._remove(lease["path"])
        self._leased.pop(digest, None)
        if not stored:
            raise BlobNotFound(blob_id)

    async def link(self, blob_id: str, *, seconds: float) -> str:
        """Return a URL under which anyone can read the blob for this long, directly from the backend.

        Raises BlobNotFound, BlobRefused if the backend has no such URLs, BlobUnavailable.
        """
        key, _ = await self._find(blob_id)
        if not isinstance(self._objects, S3Store | GCSStore | AzureStore):
            raise BlobRefused("link", "only S3, Google Cloud Storage and Azure support links")
        with store_errors("link"):
            return await obstore.sign_async(self._objects, "GET", key, timedelta(seconds=seconds))

    async def sweep(self, now: float | None = None) -> int:
        """Remove blobs that expired by ``now`` (Unix seconds) and have no lease, ended leases, and staged files of
        killed writers.

        Returns the number of removed blobs. Raises BlobUnavailable.
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
                        self._quota.release(found["size"])
                    else:
                        held += found["size"]
            async for batch in listed(self._objects, LEASES):
                for found in batch:
                    if (until := lease_until(found["path"])) is not None and until <= limit:
                        await self._remove(found["path"])
        self._quota.finish_count(count, held)
        if isinstance(self._objects, LocalStore) and self._objects.prefix is not None:
            await asyncio.to_thread(remove_staged, self._objects.prefix / _ROOT, limit - _STAGED_STALE_S)
        return removed

    async def check(self) -> None:
        """Check that the store responds. Raises BlobUnavailable."""
        with store_errors("check"):
            await listed(self._objects, f"{_ROOT}/none").collect_async()

    async def _receive(self, body: AsyncIterable[bytes], spool: IO[bytes]) -> tuple[str, int]:
        """Write a body to the spool and return its digest and size."""
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
        """Every object with this content, expired or not: key, metadata, time of the last put."""
        with store_errors("list"):
            found = await listed(self._objects, f"{_ROOT}/{digest[:2]}/{digest}").collect_async()
        stored: list[tuple[str, BlobRef, float]] = []
        for entry in found:
            if match := _KEY.fullmatch(entry["path"]):
                ref = BlobRef(blob_id=blob_id_from_digest(digest), media_type=match[3], size=entry["size"])
                stored.append((entry["path"], ref, entry["last_modified"].timestamp()))
        return stored

    async def _find(self, blob_id: str) -> tuple[str, BlobRef]:
        """Key and metadata of the newest object that has not expired."""
        stored = await self._stored(parse_blob_id(blob_id))
        key, ref, put_at = max(stored, key=lambda entry: entry[2], default=("", None, 0.0))
        now = self._clock()
        if ref is None or (self._expired(put_at, now) and await self._leased_until(parse_blob_id(blob_id)) <= now):
            raise BlobNotFound(blob_id)
        return key, ref

    def _expired(self, put_at: float, now: float) -> bool:
        return put_at + self._ttl_s <= now

    def _lock(self, key: str) -> asyncio.Lock:
        """The lock for putting or removing an object, so that a sweep cannot remove what was just renewed."""
        return self._locks.setdefault(key, asyncio.Lock())

    async def _remove_if_expired(self, key: str, now: float) -> bool:
        """Remove an object that was listed as expired, unless it was put again since."""
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
        """The latest lease end of this content (Unix seconds); 0 if there is none."""
        with store_errors("lease"):
            found = await listed(self._objects, leases_of(digest)).collect_async()
        return latest_lease(entry["path"] for entry in found)

    async def _reserve(self, key: str, size: int) -> int:
        """Reserve quota for a put and return the number of additional bytes. Raises BlobQuotaExceeded."""
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


# Leases: keep a blob beyond its lifetime because an open run may need it.
#
# A lease is an empty object next to the blobs, ``leases/<first two digits>/<digest>/<until>``. All data is in its name,
# so writers cannot overwrite each other's leases; the latest counts. Leases are looked up only if a blob's own lifetime
# has ended or would end before the requested lease.

LEASES = "leases"
_LEASE_KEY = re.compile(rf"{LEASES}/([0-9a-f]{{2}})/(\1[0-9a-f]{{62}})/(\d{{1,12}})")


def leases_of(digest: str) -> str:
    """The prefix of this blob's leases."""
    return f"{LEASES}/{digest[:2]}/{digest}"


def lease_key(digest: str, until: int) -> str:
    """The key of this blob's lease until this time (Unix seconds)."""
    return f"{leases_of(digest)}/{until}"


def lease_until(key: str) -> int | None:
    """When the lease ends; None if the key is not a lease."""
    match = _LEASE_KEY.fullmatch(key)
    return int(match[3]) if match else None


def latest_lease(keys: Iterable[str]) -> int:
    """The latest end of these leases; 0 without leases."""
    return max((until for key in keys if (until := lease_until(key)) is not None), default=0)


class OpenBlob:
    def __init__(self, ref: BlobRef, digest: str | None, read: AsyncIterator[bytes]) -> None:
        """``digest``: None for a part, which cannot be verified."""
        self.ref = ref
        self._digest = digest
        self._read = read

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the content, once. The last chunk is yielded only after the whole was verified.

        Raises BlobCorrupt if the stored bytes do not match the id, BlobUnavailable if the store fails.
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


class Quota:
    """A byte quota. Exact within one process; several processes may together exceed it by what they stored since their
    last counts.
    """

    def __init__(self, most: int | None) -> None:
        """``most``: the quota; None for none."""
        self._limit = most
        self._used: int | None = None
        """Stored bytes: the last count plus this process's changes; None before the first count."""
        self._changes = 0

    @property
    def is_set(self) -> bool:
        return self._limit is not None

    @property
    def wants_count(self) -> bool:
        """Whether the stored bytes must be counted before anything can be reserved."""
        return self.is_set and self._used is None

    def reserve(self, size: int) -> None:
        """Reserve bytes that are about to be stored. Raises BlobQuotaExceeded."""
        held = self._used or 0
        if self._limit is not None and held + size > self._limit:
            raise BlobQuotaExceeded("quota", f"{held} of {self._limit} bytes are used, {size} more were requested")
        self._changes += 1
        self._add(size)

    def release(self, size: int) -> None:
        """Release bytes that were removed, or not stored after all."""
        self._add(-size)

    def begin_count(self) -> int:
        """Start a count; pass the returned value to `counted`."""
        return self._changes

    def finish_count(self, begun: int, held: int) -> None:
        """Finish a count, which excludes bytes released meanwhile. Ignored if anything was stored meanwhile, because
        the count may or may not include it.
        """
        if self._changes == begun:
            self._used = held

    def _add(self, size: int) -> None:
        if self._used is not None:
            self._used += size


# Range requests for blobs (RFC 9110, 14). A single range only; multiple ranges get the whole blob.

_RANGE = re.compile(r"bytes=\s*([0-9]{0,18})-([0-9]{0,18})\s*")


class ByteRange(NamedTuple):
    """Bytes ``start`` to ``end``, exclusive."""

    start: int
    end: int


class OutOfRange(Exception):
    """The range contains no byte of the blob."""


def part_of(header: str, size: int) -> ByteRange | None:
    """Parse a Range header for a blob of ``size`` bytes; None for the whole blob and for unsupported headers.

    Raises OutOfRange.
    """
    match = _RANGE.fullmatch(header)
    if match is None or match[1] == match[2] == "":
        return None
    if match[1] == "":  # the last N bytes
        last = int(match[2])
        if last == 0 or size == 0:
            raise OutOfRange
        return ByteRange(max(0, size - last), size)
    start = int(match[1])
    if match[2] and int(match[2]) < start:
        return None
    if start >= size:
        raise OutOfRange
    return ByteRange(start, min(size, int(match[2]) + 1) if match[2] else size)
