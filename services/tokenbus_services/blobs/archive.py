"""The logs of ended runs in the object store, by day and tenant, found again by run, and listed by the time of the end.

- ``archive/logs/<day>/<tenant>/<ended>-<run>``: the log (`archive_format`): a line with the run's `RunInfo`, then its
  public events, a line each
- ``archive/runs/<xx>/<run>/<day>.<tenant>.<ended>``: where that is; its content: digests of the blobs that it names
- ``archive/blobs/<digest>/<day>.<tenant>.<ended>.<run>``: that a log names this blob
- ``archive/gone/<run>``: the run was erased just now, so what a recorder still has of it is not stored

All names follow from the run, so storing it twice is storing it once, and whoever dies between two objects has broken
nothing. A log counts once its place is stored; a blob that it names is leased for as long as the log is kept.
"""

from __future__ import annotations

import asyncio
import heapq
import re
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Mapping
from contextlib import aclosing, suppress
from tempfile import SpooledTemporaryFile
from typing import Any, NamedTuple
from zlib import crc32

import msgspec
import obstore
from obstore.store import ObjectStore

from tokenbus.blobs import blob_id_from_digest, parse_blob_id
from tokenbus.errors import BlobError, BlobNotFound, BlobRefused, BlobTooLarge
from tokenbus.events.requests import is_run_id
from tokenbus.events.run_info import RunInfo
from tokenbus_services.blobs.archive_format import HEAD_BYTES, PIECE_BYTES, Reader, Writer
from tokenbus_services.blobs.archive_keys import TenantKeys, tenant_ref
from tokenbus_services.blobs.backend import listed, store_errors
from tokenbus_services.blobs.store import BlobStore

ROOT = "archive"
LOGS, RUNS, BLOBS, GONE = (f"{ROOT}/{name}" for name in ("logs", "runs", "blobs", "gone"))
MOST_BYTES = 2**30
"""Of one log."""
MOST_LISTED = 256
HEADS_AT_ONCE = 16
GONE_S = 3600.0
"""A recorder that had begun before an erasure has ended by then."""
DAY_MS = 86_400_000
_SPOOL_BYTES = 2**20
_PLACE = re.compile(r"(\d{6})\.([0-9a-f]{32})\.(\d{13})")
_LOG = re.compile(rf"{LOGS}/(\d{{6}})/([0-9a-f]{{32}})/(\d{{13}})-([^/]+)")
_BLOB_ID = re.compile(rb"sha256:[0-9a-f]{64}")
_ID_BYTES = 70
"""Characters of an id that may be at the end of one piece while the rest is in the next."""
_NAMED = re.compile(rf"{BLOBS}/[0-9a-f]{{64}}/\d{{6}}\.([0-9a-f]{{32}})\.(\d{{13}})\..+")
_info = msgspec.json.Decoder(RunInfo)


class Place(NamedTuple):
    """Where a log is. In the order of time, and then of ids."""

    ended_ms: int
    run: str
    tenant: str
    """A `tenant_ref`."""

    @property
    def day(self) -> str:
        return f"{self.ended_ms // DAY_MS:06d}"

    @property
    def path(self) -> str:
        return f"{LOGS}/{self.day}/{self.tenant}/{self.ended_ms:013d}-{self.run}"

    @property
    def name(self) -> str:
        return f"{self.day}.{self.tenant}.{self.ended_ms:013d}"

    @property
    def pointer(self) -> str:
        return f"{_pointers(self.run)}/{self.name}"


After = tuple[int, str] | None
"""The time of a run's end, and its id."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Which logs to list or delete, and in which order."""

    tenant: str | None = None
    since_ms: int = 0
    until_ms: int | None = None
    after: After = None
    newest_first: bool = True

    def looks_at(self, day: str) -> bool:
        """Whether something of this day may be wanted."""
        first, last = int(day) * DAY_MS, (int(day) + 1) * DAY_MS - 1
        if last < self.since_ms or (self.until_ms is not None and first > self.until_ms):
            return False
        return self.after is None or (first <= self.after[0] if self.newest_first else last >= self.after[0])

    def wants(self, place: Place) -> bool:
        """Whether this log is wanted."""
        here = place.ended_ms, place.run
        if self.after is not None and (here >= self.after if self.newest_first else here <= self.after):
            return False
        return place.ended_ms >= self.since_ms and (self.until_ms is None or place.ended_ms <= self.until_ms)


class Archive:
    """Stores, reads, lists and deletes logs. One object per process; safe for concurrent use."""

    def __init__(
        self,
        objects: ObjectStore,
        blobs: BlobStore,
        keys: TenantKeys,
        *,
        keep_s: float,
        keep_tenants_s: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``keep_s``: how long after its end a run is kept; ``keep_tenants_s``: the same, for runs of these tenants."""
        self._objects = objects
        self._blobs = blobs
        self._keys = keys
        self._keep_s = keep_s
        self._keep_tenants = {tenant_ref(tenant): seconds for tenant, seconds in (keep_tenants_s or {}).items()}
        self._clock = clock

    async def put(self, lines: AsyncIterable[bytes]) -> RunInfo:
        """Store a log: a line with its `RunInfo`, and a line for each event, in pieces of any size.

        Raises BlobRefused for anything else, and for a run that was erased just now; BlobTooLarge, BlobUnavailable,
        BlobStoreFull, and any exception of ``lines``; nothing is to be found then that was not before.
        """
        pieces = _pieces(lines)
        async with aclosing(pieces):
            first = await anext(pieces, b"")
            info = _info_of(first)
            tenant = info.tenant or ""
            place = Place(info.ended_ms or 0, info.run, tenant_ref(tenant))
            if await self._is_gone(place.run):
                raise BlobRefused("archive", "this run was erased")
            with SpooledTemporaryFile[bytes](max_size=_SPOOL_BYTES) as spool:
                named = await self._write(spool, Writer(place.path, self._keys.sealing(tenant)), first, pieces)
                spool.seek(0)
                with store_errors("archive"):
                    await obstore.put_async(self._objects, place.path, spool, max_concurrency=2)
        for digest in named:
            await self._name_blob(digest, place)
        with store_errors("archive"):
            await obstore.put_async(self._objects, place.pointer, msgspec.json.encode(sorted(named)))
        if await self._is_gone(place.run):  # the erasure may have looked before the place was there
            await self._delete(place)
            raise BlobRefused("archive", "this run was erased")
        for other in await self._places(place.run) - {place}:
            before = await self._head(other)
            if before and before.accepted_ms == info.accepted_ms:  # the server was restored, and the run ended again
                await self._delete(other)
        return info

    async def open(self, run: str) -> tuple[RunInfo, AsyncGenerator[bytes]]:
        """The run's summary, and its events in pieces of any size; of a run whose id was used again, the newest one.

        Raises BlobNotFound, also if its key is gone; BlobCorrupt, BlobRefused for an invalid id, BlobUnavailable.
        """
        places = await self._places(run)
        if not places:
            raise BlobNotFound(run)
        place = max(places)
        with store_errors("archive"):
            try:
                found = await obstore.get_async(self._objects, place.path)
            except FileNotFoundError:
                raise BlobNotFound(run) from None
        pieces = self._plain(place, found.stream(min_chunk_size=PIECE_BYTES))
        try:
            return _info_of(await anext(pieces, b"")), pieces
        except BaseException:
            await pieces.aclose()
            raise

    async def list(self, wanted: Wanted, *, limit: int = MOST_LISTED) -> tuple[list[RunInfo], After]:
        """The next runs by the time of their end, and where to continue; None at the end. Leaves out those whose key is
        gone. Costs a request for each day that is looked at, and one for each run. Raises BlobUnavailable.
        """
        found: list[RunInfo] = []
        for day in await self._days(newest_first=wanted.newest_first):
            while len(found) < limit and wanted.looks_at(day):
                places = await self._next(day, wanted, limit - len(found))
                if not places:
                    break
                wanted = msgspec.structs.replace(wanted, after=(places[-1].ended_ms, places[-1].run))
                found += [info for info in await self._infos(places) if info]
            if len(found) >= limit:
                return found, wanted.after
        return found, None

    async def delete(self, run: str) -> tuple[int, set[str]]:
        """Delete the logs of a run, and keep what a recorder has of it from being stored. Returns how many there were,
        and the blobs that they named and that no other log names. Raises BlobRefused, BlobUnavailable.
        """
        places = await self._places(run)
        with store_errors("archive"):
            await obstore.put_async(self._objects, f"{GONE}/{run}", b"")
        places = {*places, *await self._places(run)}
        named: set[str] = set()
        for place in places:
            named |= await self._delete(place)
        return len(places), {blob_id for blob_id in named if not await self.names(blob_id)}

    async def delete_all(self, wanted: Wanted) -> int:
        """Delete all logs that are wanted, also those whose key is gone; how many. Raises BlobUnavailable."""
        count = 0
        for day in await self._days(newest_first=wanted.newest_first):
            while wanted.looks_at(day) and (places := await self._next(day, wanted, MOST_LISTED)):
                for place in places:
                    await self._delete(place)
                count += len(places)
        return count

    async def names(self, blob_id: str) -> bool:
        """Whether a log names this blob."""
        with store_errors("archive"):
            return bool(await listed(self._objects, f"{BLOBS}/{parse_blob_id(blob_id)}").collect_async())

    async def sweep(self) -> int:
        """Remove what was kept for its time; how many logs. Raises BlobUnavailable."""
        now, count = self._clock(), 0
        with store_errors("archive"):
            for day in await self._days(newest_first=False):
                if (int(day) * DAY_MS) / 1000 + min(self._keep_s, *self._keep_tenants.values(), self._keep_s) > now:
                    break
                async for batch in listed(self._objects, f"{LOGS}/{day}"):
                    for place in [place for entry in batch if (place := _place(entry["path"]))]:
                        if self._expired(place.tenant, place.ended_ms, now):
                            await self._delete(place)
                            count += 1
            async for batch in listed(self._objects, BLOBS):
                for entry in batch:
                    named = _NAMED.fullmatch(entry["path"])
                    if named and self._expired(named[1], int(named[2]), now):
                        await self._remove(entry["path"])
            async for batch in listed(self._objects, GONE):
                for entry in batch:
                    if entry["last_modified"].timestamp() + GONE_S < now:
                        await self._remove(entry["path"])
        return count

    # ----------------------------------------------------------------------------------------------------------

    async def _write(self, spool: Any, writer: Writer, first: bytes, pieces: AsyncIterator[bytes]) -> set[str]:
        """Write the object to the spool; returns the digests of the blobs that the log names."""
        named = {parse_blob_id(name.decode()) for name in _BLOB_ID.findall(first)}
        size, before, held = 0, b"", first

        def write(piece: bytes, *, last: bool) -> None:
            spool.write(writer.piece(piece, last=last))

        await asyncio.to_thread(spool.write, writer.head)
        async for piece in pieces:
            size += len(piece)
            if size > MOST_BYTES:
                raise BlobTooLarge(size, MOST_BYTES)
            named.update(parse_blob_id(name.decode()) for name in _BLOB_ID.findall(before + piece))
            before = piece[-_ID_BYTES:]
            await asyncio.to_thread(write, held, last=False)
            held = piece
        await asyncio.to_thread(write, held, last=True)
        return named

    async def _name_blob(self, digest: str, place: Place) -> None:
        with store_errors("archive"):
            await obstore.put_async(self._objects, f"{BLOBS}/{digest}/{place.name}.{place.run}", b"")
        with suppress(BlobNotFound):  # it had expired before its run ended
            # A lease of half its time counts as one, so twice the time is asked for.
            await self._blobs.lease(blob_id_from_digest(digest), seconds=2 * self._keep(place.tenant))

    async def _plain(self, place: Place, stored: AsyncIterable[bytes]) -> AsyncGenerator[bytes]:
        reader = Reader(place.path, lambda: self._keys.opening(place.tenant))
        with store_errors("archive"):
            async for part in stored:
                for piece in reader.feed(part):
                    yield piece
        if not reader.ended:
            raise BlobNotFound(place.run)

    async def _infos(self, places: list[Place]) -> list[RunInfo | None]:
        infos: list[RunInfo | None] = []
        for at in range(0, len(places), HEADS_AT_ONCE):
            infos += await asyncio.gather(*map(self._head, places[at : at + HEADS_AT_ONCE]))
        return infos

    async def _head(self, place: Place) -> RunInfo | None:
        """The summary of a log; None if it cannot be read."""
        reader = Reader(place.path, lambda: self._keys.opening(place.tenant))
        with store_errors("archive"):
            try:
                found = await obstore.get_async(self._objects, place.path, options={"range": (0, HEAD_BYTES)})
                first = next(reader.feed(bytes(await found.bytes_async())), None)
            except (FileNotFoundError, BlobNotFound):
                return None
        try:
            return None if first is None else _info_of(first)
        except BlobError:
            return None

    async def _days(self, *, newest_first: bool) -> list[str]:
        with store_errors("archive"):
            found = await obstore.list_with_delimiter_async(self._objects, LOGS)  # pyright: ignore[reportUnknownMemberType]
        days = (name.rpartition("/")[2] for name in found["common_prefixes"])
        return sorted((day for day in days if day.isdigit()), reverse=newest_first)

    async def _next(self, day: str, wanted: Wanted, count: int) -> list[Place]:
        """The next places of a day. Holds no more of its names in memory than it returns."""
        chosen: list[Place] = []
        pick = heapq.nlargest if wanted.newest_first else heapq.nsmallest
        prefix = f"{LOGS}/{day}" if wanted.tenant is None else f"{LOGS}/{day}/{tenant_ref(wanted.tenant)}"
        with store_errors("archive"):
            async for batch in listed(self._objects, prefix):
                places = [place for entry in batch if (place := _place(entry["path"]))]
                chosen = pick(count, [*chosen, *filter(wanted.wants, places)])
        return chosen

    async def _places(self, run: str) -> set[Place]:
        if not is_run_id(run):
            raise BlobRefused("run", "not a run id")
        with store_errors("archive"):
            found = await listed(self._objects, _pointers(run)).collect_async()
        names = [_PLACE.fullmatch(entry["path"].rpartition("/")[2]) for entry in found]
        return {Place(int(name[3]), run, name[2]) for name in names if name}

    async def _delete(self, place: Place) -> set[str]:
        """Delete one log, and say which blobs it named. What names it goes last, so that a delete may be repeated."""
        with store_errors("archive"):
            try:
                stored = await obstore.get_async(self._objects, place.pointer)
                named = msgspec.json.decode(bytes(await stored.bytes_async()), type=set[str])
            except (FileNotFoundError, msgspec.DecodeError):
                named = set[str]()
        await self._remove(place.path)
        for digest in named:
            await self._remove(f"{BLOBS}/{digest}/{place.name}.{place.run}")
        await self._remove(place.pointer)
        return {blob_id_from_digest(digest) for digest in named}

    async def _is_gone(self, run: str) -> bool:
        with store_errors("archive"):
            try:
                await obstore.head_async(self._objects, f"{GONE}/{run}")
            except FileNotFoundError:
                return False
        return True

    async def _remove(self, path: str) -> None:
        with store_errors("archive"), suppress(FileNotFoundError):
            await obstore.delete_async(self._objects, path)

    def _keep(self, tenant: str) -> float:
        return self._keep_tenants.get(tenant, self._keep_s)

    def _expired(self, tenant: str, ended_ms: int, now: float) -> bool:
        return ended_ms / 1000 + self._keep(tenant) <= now


def _pointers(run: str) -> str:
    return f"{RUNS}/{crc32(run.encode()) % 256:02x}/{run}"


def _place(path: str) -> Place | None:
    found = _LOG.fullmatch(path)
    return Place(int(found[3]), found[4], found[2]) if found else None


async def _pieces(lines: AsyncIterable[bytes]) -> AsyncGenerator[bytes]:
    """The first line, then the rest in pieces of `PIECE_BYTES`."""
    pending, begun = bytearray(), False
    async for part in lines:
        pending += part
        if not begun and (end := pending.find(b"\n", 0, PIECE_BYTES)) >= 0:
            yield bytes(pending[: end + 1])
            del pending[: end + 1]
            begun = True
        while begun and len(pending) >= PIECE_BYTES:
            yield bytes(pending[:PIECE_BYTES])
            del pending[:PIECE_BYTES]
        if not begun and len(pending) >= PIECE_BYTES:
            raise BlobRefused("archive", "the first line is too long")
    if pending or not begun:
        yield bytes(pending)


def _info_of(line: bytes) -> RunInfo:
    try:
        info = _info.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise BlobRefused("archive", f"the first line is not about a run: {e}") from None
    if info.ended_ms is None or not 0 < info.ended_ms < 10**13 or not is_run_id(info.run):
        raise BlobRefused("archive", "the first line is not about a run that has ended")
    return info
