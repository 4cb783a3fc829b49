"""A recorder: takes selected finished runs from the queue and stores a record of each, once.

Every step may be repeated safely. A record's blobs are content-addressed; the index has one entry per run; and once the
server starts to drop a run's data, there is nothing more to record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import structlog
from prometheus_client import CollectorRegistry, Counter

from tokenbus.blobs import BlobStreams
from tokenbus.bus.keys import DATA_FIELD, Keys
from tokenbus.bus.liveness import Liveness, beating, rest, stop_task
from tokenbus.bus.records import RecordEntry, drop_old_records, forget_recorded, newest_records, put_record
from tokenbus.bus.run_record import ACCEPTED, FRAME, HISTORY, RECORD, REQUEST
from tokenbus.bus.server.retry import Defects, retry_until_available
from tokenbus.bus.server.server import Server
from tokenbus.bus.work_queue import QueueItem
from tokenbus.core.request.bounds import tenant_of
from tokenbus.errors import BlobError, BlobNotFound
from tokenbus.events.frames import ANY_FRAME, history_decoder
from tokenbus_services.blobs.client import loader_of
from tokenbus_services.recorder import record as records
from tokenbus_services.recorder.record import Record, packed
from tokenbus_services.runtime.app.service_app import worker_name
from tokenbus_services.runtime.metrics import DeadLetterMetrics
from tokenbus_services.runtime.queue_work import Later, QueueWork, dead_letter_item
from tokenbus_services.runtime.worker_core import DeploymentAgreement
from tokenbus_services.settings import RecordSettings, Settings
from tokenbus_services.telemetry import NO_TRACER, RunTracer, Span

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

GROUP = "recorder"
AT_ONCE = 2
"""Concurrent records: each may need several times `records.raw_bytes` of memory."""
MOST_DELIVERIES = 3
"""A run whose recorders died this often is not recorded: it may be what kills them."""
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


class RecordService:
    """The recorded runs of a deployment, shared among its recorders."""

    name = "recorder"

    def __init__(
        self, settings: Settings, keep: RecordSettings, metrics: RecordMetrics, tracer: RunTracer = NO_TRACER
    ) -> None:
        assert settings.redis_url
        self._settings = settings
        self._keys = keys = settings.keys
        self._keep_ms = round(keep.keep_s * 1000)
        self._most = keep.keep_entries
        self._metrics = metrics
        self._server = server = Server(settings.redis_url)
        server.on_dead_letter = metrics.dead_letters.count
        self._tracer = tracer
        self.liveness = Liveness()
        worker = worker_name()
        self._deployment = DeploymentAgreement(server, keys, self.liveness, worker=worker)
        self._deployment.on_grown(self._serve_more)
        self._blobs = loader_of(settings.blobs)
        self._recordings = QueueWork(
            server,
            settings,
            group=GROUP,
            topic="records",
            worker=worker,
            most=AT_ONCE,
            work=self._work,
            poisoned=partial(dead_letter_item, server, settings, GROUP),
            still_s=lambda item: STILL_S,
            liveness=self.liveness,
        )
        self._renewing: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        return self._recordings.healthy

    async def open(self) -> None:
        await self._server.check()
        await self._deployment.open()
        await self._recordings.open()
        self._renewing = self.liveness.start(self._renew_all(), name="leases of records")

    async def drain(self) -> None:
        """Take nothing new, and let records in progress finish."""
        await self._recordings.drain()

    async def close(self) -> None:
        await self._recordings.close()
        await self._deployment.close()
        await stop_task(self._renewing)
        await self._blobs.aclose()
        await self._server.aclose()
        await self._tracer.close()

    async def _serve_more(self, keys: Keys) -> None:
        await self._recordings.add_partitions(keys)

    async def read(self) -> QueueItem:
        """Return the next run to record, once there is room for it."""
        return await self._recordings.read()

    async def start(self, item: QueueItem) -> None:
        await self._recordings.start(item)

    async def _work(self, item: QueueItem) -> None:
        if item.deliveries > MOST_DELIVERIES:
            raise RuntimeError(f"its recorder was lost {item.deliveries - 1} times")
        for name, status in item.fields.items():
            await self._record(name.decode(), status.decode())

    async def _record(self, run: str, status: str) -> None:
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
        clock = asyncio.get_running_loop().time
        pause, until = FIRST_PAUSE_S, clock() + STORE_PATIENCE_S
        while True:
            try:
                stored = await records.store(kept, self._blobs)
                media = await self._leased(kept.media())
                break
            except BlobError as e:
                if not e.retryable:
                    raise
                if pause == FIRST_PAUSE_S:
                    log.warning("blob_store_unavailable", run=kept.run, code=e.code, problem=str(e))
                if clock() > until:
                    raise Later from e
                await rest(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
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
        self.dead_letters = DeadLetterMetrics(registry)
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
    while page := await _page(server, stream, begin):
        values += [fields[field] for _, fields in page]
        begin = f"({page[-1][0].decode()}"
    return values


async def _page(server: Server, stream: str, begin: str) -> list[Any]:
    return await server.client.xrange(stream, begin, "+", count=PAGE)
