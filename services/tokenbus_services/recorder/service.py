"""A recorder: takes finished runs from the queue, stores a record of those that were selected, and archives the logs of
all if the deployment has an archive; each once.

Every step may be repeated safely. A record's blobs are content-addressed; the index has one entry per run; and once the
server starts to drop a run's data, there is nothing more to record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import TypeVar

import msgspec
import structlog
from prometheus_client import CollectorRegistry, Counter

from tokenbus.blobs import BlobStreams
from tokenbus.bus import process_clock
from tokenbus.bus.keys import DATA_FIELD, Keys
from tokenbus.bus.layout import announce_archive
from tokenbus.bus.liveness import beating, rest, stop_task
from tokenbus.bus.records import RecordEntry, drop_old_records, forget_recorded, newest_records, put_record
from tokenbus.bus.run_record import ACCEPTED, FRAME, HISTORY, RECORD, REQUEST
from tokenbus.bus.server.retry import Defects, retry_until_available
from tokenbus.bus.server.server import Server
from tokenbus.bus.topology import RECORDER
from tokenbus.bus.work_queue import QueueItem
from tokenbus.client.archive import Archive
from tokenbus.core.request.bounds import tenant_of
from tokenbus.errors import BlobError, BlobNotFound, BlobRefused
from tokenbus.events.frames import ANY_FRAME, history_decoder
from tokenbus.events.run_info import RunInfo
from tokenbus_services.blobs.client import archive_of, loader_of
from tokenbus_services.recorder import record as records
from tokenbus_services.recorder.archiving import archived, log_lines, read_page, to_archive
from tokenbus_services.recorder.record import Record, packed
from tokenbus_services.runtime.queue_work import MOST_DELIVERIES, Later, QueueService
from tokenbus_services.runtime.worker_core import WorkerCore
from tokenbus_services.settings import RecordSettings
from tokenbus_services.telemetry import Span

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)
T = TypeVar("T")

RECORDS_AT_ONCE = 2
"""Concurrent records: each may need several times `records.raw_bytes` of memory."""
AT_ONCE = 8
"""Concurrent runs: a log that is archived needs some pages of memory."""
ARCHIVING_S = 120.0
"""How long one try to archive a log may take. Then another run gets its slot."""
ANNOUNCE_S = 10.0
"""How often the deployment is told that there is an archive, which readers ask for what the server does not have."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
STORE_PATIENCE_S = 30.0
"""How long a record waits for an unavailable or full store. Then others get its slot, because the store may reject only
this record.
"""
STILL_S = 900.0
"""A record without progress for this long is stuck; the store's own timeouts are much shorter."""
RENEWALS_A_LEASE = 4
RENEW_AGAIN_S = 60.0
"""Pause after a round of renewals that failed."""
LEASE_S = 40.0
"""Maximum time to lease one blob, given the timeouts of the store's client."""


class RecordService(QueueService):
    """The recorded runs of a deployment, shared among its recorders."""

    name, topic = RECORDER
    description = "Runs that are over, each to be recorded in the blob store, or archived."

    def __init__(self, core: WorkerCore) -> None:
        super().__init__(core, most=AT_ONCE)
        settings = core.settings
        keep = settings.records or RecordSettings()
        self._keep_ms = round(keep.keep_s * 1000)
        self._most = keep.keep_entries
        self._metrics = RecordMetrics(core.registry)
        self._blobs = loader_of(settings.blobs)
        self._archive = archive_of(settings.blobs) if settings.archive else None
        self._announce_at = 0.0
        self._at_once = asyncio.Semaphore(RECORDS_AT_ONCE)
        self._tracer = core.tracer
        self._renewing: asyncio.Task[None] | None = None

    async def _opening(self) -> None:
        if self._archive:
            await retry_until_available(self._server, self._announce, what="announcement of the archive")
        self._renewing = self.liveness.start(self._renew_all(), name="leases of records")

    async def _closing(self) -> None:
        await stop_task(self._renewing)
        await self._blobs.aclose()

    def _still_s(self, item: QueueItem) -> float:
        return STILL_S

    async def _work(self, item: QueueItem) -> None:
        if item.deliveries > MOST_DELIVERIES:
            raise RuntimeError(f"its recorder was lost {item.deliveries - 1} times")
        for name, status in item.fields.items():
            await self._of_run(name.decode(), status.decode())

    async def _of_run(self, run: str, status: str) -> None:
        if self._archive:
            await self._to_archive(run, self._archive)
        async with self._at_once:
            await self._record(run, status)

    async def _announce(self) -> None:
        if asyncio.get_running_loop().time() >= self._announce_at:
            self._announce_at = asyncio.get_running_loop().time() + ANNOUNCE_S
            await announce_archive(self._server, self._keys)

    async def _to_archive(self, run: str, archive: Archive) -> None:
        """Archive the log of a run, unless that is done. Every step may be repeated."""
        info = await retry_until_available(
            self._server, lambda: to_archive(self._server, self._keys, run), what="look-up of a run to archive"
        )
        if info is None:
            return

        async def put() -> RunInfo:
            async with process_clock.timeout(ARCHIVING_S):
                return await archive.put_log(log_lines(self._server, self._keys, info))

        try:
            await self._patiently(run, lambda: beating(put(), most_s=2 * ARCHIVING_S))
        except BlobRefused as e:  # it was erased meanwhile
            log.info("not_archived", run=run, problem=e.problem)
            return
        await retry_until_available(
            self._server, lambda: archived(self._server, self._keys, run), what="note of an archived run"
        )
        await retry_until_available(self._server, self._announce, what="announcement of the archive")
        self._metrics.archived.labels(info.state).inc()

    async def _record(self, run: str, status: str) -> None:
        if self._settings.records is None:
            return
        kept = await retry_until_available(
            self._server, lambda: gather(self._server, self._keys, run), what="look-up of a recorded run"
        )
        if kept is None:
            await self._forget(run)  # the previous recorder may have died while doing this
            log.info("nothing_to_record", run=run)
            return
        with self._recording(kept):
            entry = await self._stored(kept, status)
            await retry_until_available(
                self._server,
                lambda: put_record(self._server, self._keys, entry, keep_ms=self._keep_ms, most=self._most),
                what="index of records",
            )
        await self._forget(run)
        self._metrics.recorded(entry)
        log.info("recorded", run=run, status=status, blob_id=entry.blob_id, truncated=entry.truncated)

    @contextmanager
    def _recording(self, kept: Record) -> Generator[None]:
        """Record a span of what is done meanwhile; requests to the blob store are beneath it."""
        traceparent, now_ms = kept.request.get("traceparent"), self._server.clock.now_ms
        begin_ms, error = now_ms(), None
        try:
            with self._tracer.working(kept.run, traceparent, "record"):
                yield
        except Exception as e:
            error = type(e).__name__
            raise
        finally:
            if trace := self._tracer.trace(kept.run, traceparent):
                self._tracer.record(
                    trace,
                    Span(
                        name="record",
                        span_id=trace.span("record"),
                        parent_id=trace.root,
                        begin_ms=begin_ms,
                        end_ms=now_ms(),
                        attributes={
                            "tokenbus.run.id": kept.run,
                            "tokenbus.raw_bytes": len(kept.frames),
                            "tokenbus.truncated": kept.truncated,
                        },
                        error=error,
                    ),
                )

    async def _forget(self, run: str) -> None:
        await retry_until_available(
            self._server, lambda: forget_recorded(self._server, self._keys, run), what="end of a recording"
        )

    async def _stored(self, kept: Record, status: str) -> RecordEntry:
        """Store the record, waiting for a store that is unavailable or full. Raises Later if that lasts."""

        async def store() -> tuple[records.Stored, set[str]]:
            return await records.store(kept, self._blobs), await self._leased(kept.media())

        stored, media = await self._patiently(kept.run, store)
        return RecordEntry(
            run=kept.run,
            at_ms=kept.accepted_ms,
            status=status,
            tenant=tenant_of(kept.request.get("metadata")),
            provider=str(kept.request.get("provider", "")),
            model=str(kept.request.get("model", "")),
            attempts=max((frame.attempt for frame in kept.raw_frames()), default=0),
            raw_bytes=len(kept.frames),
            blob_id=stored.ref.blob_id,
            size=stored.ref.size,
            parts=tuple(sorted(stored.parts | media)),
            truncated=kept.truncated,
        )

    async def _patiently(self, run: str, work: Callable[[], Awaitable[T]]) -> T:
        """Repeat this while the store is unavailable or full. Raises Later if that lasts; BlobError."""
        clock = asyncio.get_running_loop().time
        pause, until = FIRST_PAUSE_S, clock() + STORE_PATIENCE_S
        while True:
            try:
                return await work()
            except (BlobError, TimeoutError) as e:
                if isinstance(e, BlobError) and not e.retryable:
                    raise
                if pause == FIRST_PAUSE_S:
                    code = e.code if isinstance(e, BlobError) else "timeout"
                    log.warning("blob_store_unavailable", run=run, code=code, problem=str(e))
                if clock() > until:
                    raise Later from e
                await rest(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _leased(self, blob_ids: set[str]) -> set[str]:
        """Lease the blobs that exist for as long as the record and return them: a run's media may have expired before
        its end. Stores without leases have their own rules.
        """
        if not isinstance(self._blobs, BlobStreams):
            return blob_ids
        there: set[str] = set()
        for blob_id in sorted(blob_ids):
            try:
                await beating(self._blobs.lease(blob_id), most_s=LEASE_S)
            except BlobNotFound:
                continue
            there.add(blob_id)
        return there

    # --- what is indexed stays --------------------------------------------------------------------------------

    async def _renew_all(self) -> None:
        """Keep renewing the leases of all records' blobs, until the index drops the records.

        Raises what always fails.
        """
        defects = Defects()
        while True:
            pause_s = self._settings.retention.open_run_s / RENEWALS_A_LEASE
            try:
                await drop_old_records(self._server, self._keys, keep_ms=self._keep_ms, most=self._most)
                async for entry in newest_records(self._server, self._keys):
                    await self._renew(entry)
                defects.none()
            except Exception as e:  # any exception: a later round may succeed, long before a lease ends
                log.warning("renewal_failed", problem=f"{type(e).__name__}: {e}")
                self.liveness.failed_work("leases of records")
                if not isinstance(e, BlobError):  # the store may be away for any time
                    defects.count(e)
                pause_s = min(pause_s, RENEW_AGAIN_S)
            await rest(pause_s)

    async def _renew(self, entry: RecordEntry) -> None:
        """Renew the leases of a record's blobs. Raises BlobError if the store is unavailable."""
        wanted = {entry.blob_id, *entry.parts}
        try:
            missing = wanted - await self._leased(wanted)
        except BlobError as e:
            if e.retryable:
                raise
            # Only this record fails: the older ones after it are still renewed.
            log.warning("record_not_renewed", run=entry.run, problem=str(e))
            return
        if missing:
            log.warning("record_incomplete", run=entry.run, missing=sorted(missing))


class RecordMetrics:
    """Counts records by the outcome of the run, and their raw bytes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.archived = Counter(
            "tokenbus_archived", "Runs whose logs were archived, by outcome.", ["status"], registry=registry
        )
        self._records = Counter("tokenbus_records", "Recorded runs, by outcome.", ["status"], registry=registry)
        self._bytes = Counter("tokenbus_record_raw_bytes", "Raw stream bytes in records.", registry=registry)

    def recorded(self, entry: RecordEntry) -> None:
        self._records.labels(entry.status).inc()
        self._bytes.inc(entry.raw_bytes)


PAGE = 100
"""Frames or entries to read at once; a frame may have 256 KB."""


async def gather(server: Server, keys: Keys, run: str) -> Record | None:
    """Build the record; None if the data is gone (already recorded, or expired). Raises redis-py's exceptions."""
    client, key = server.client, keys.run(run)
    names = sorted((name.decode() for name in await client.hkeys(key)), key=_place)
    found = await _fields(server, key, [n for n in names if n.startswith(FRAME)])
    tape = await _entries(server, keys.tape(run), b"taken")
    events = await _entries(server, keys.log(run), DATA_FIELD.encode())
    histories = await _fields(server, key, [n for n in names if n.startswith(HISTORY)])
    # Read last: while this field exists, nothing above was dropped.
    accepted, request, left = await client.hmget(key, [ACCEPTED, REQUEST, RECORD])
    if left is None or request is None:
        return None
    return Record(
        run=run,
        accepted_ms=int(accepted or 0),
        request=msgspec.json.decode(request),
        history={
            name.removeprefix(HISTORY): msgspec.to_builtins(history_decoder.decode(data))
            for name, data in histories.items()
        },
        frames=packed(list(found.values())),
        tape=packed(tape),
        events=[msgspec.json.decode(event) for event in events],
        truncated=int(left) < 0,
    )


def _place(name: str) -> tuple[float, ...]:
    """Sort key of a field. An end frame not written by the attempt's fetcher is the last of its attempt."""
    if name.startswith(HISTORY):
        return (int(name.removeprefix(HISTORY)),)
    if name.startswith(FRAME):
        attempt, n = map(int, name.removeprefix(FRAME).split(":"))
        return attempt, float("inf") if n == ANY_FRAME else n
    return ()


async def _fields(server: Server, key: str, names: list[str]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for at in range(0, len(names), PAGE):
        page = names[at : at + PAGE]
        values: list[bytes | None] = await server.client.hmget(key, page)
        found.update((name, value) for name, value in zip(page, values, strict=True) if value is not None)
    return found


async def _entries(server: Server, stream: str, field: bytes) -> list[bytes]:
    values: list[bytes] = []
    begin = "-"
    while page := await read_page(server, stream, begin):
        values += [fields[field] for _, fields in page]
        begin = f"({page[-1][0].decode()}"
    return values
