"""Recorded runs that the server has no more: the console shows them from their records."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator

from tokenbus.blobs import BlobLoader
from tokenbus.bus.keys import Keys
from tokenbus.bus.records import RecordEntry, find_record, newest_records
from tokenbus.bus.run_index import Position, read_summaries
from tokenbus.bus.server.server import Server, translated
from tokenbus.errors import BlobError, Malformed, NotStorable, RecordNotFound
from tokenbus.events.public import RunEnd
from tokenbus.events.run_info import RunInfo
from tokenbus_services.console.access.session import Viewer
from tokenbus_services.gateway.runs import not_found
from tokenbus_services.recorder.record import Outline, load_outline

_MOST_KEPT = 8
"""Records in memory: a page asks for the same one several times."""
_BATCH = 64


class RecordedRun:
    """A run as its record tells it."""

    def __init__(self, entry: RecordEntry, outline: Outline) -> None:
        self.entry = entry
        self.request = outline.request
        self.events = outline.events
        last = self.events[-1] if self.events else None
        self.end = last if isinstance(last, RunEnd) else None
        took_ms = self.end.timing.total_ms if self.end else 0
        self.info = RunInfo(
            run=entry.run,
            state=entry.status,  # pyright: ignore[reportArgumentType] - one of the ended states
            accepted_ms=entry.at_ms,
            ended_ms=entry.at_ms + round(took_ms or 0),
            provider=entry.provider or None,
            model=entry.model or None,
            tenant=entry.tenant or None,
            turn=last.turn if last else 0,
            attempt=last.attempt if last else 1,
            events=len(self.events),
            finish=self.end.finish if self.end else None,
            error=error.code if (error := getattr(self.end, "error", None)) else None,
        )


class RecordedRuns:
    """Finds records, and reads them."""

    def __init__(self, server: Server, keys: Keys, blobs: BlobLoader) -> None:
        self._server = server
        self._keys = keys
        self._blobs = blobs
        self._kept: OrderedDict[str, RecordedRun] = OrderedDict()

    async def find(self, run: str, viewer: Viewer) -> RecordedRun:
        """The recorded run. Raises Refusal (404) if there is none, or not for this viewer."""
        viewer.check_run(run)
        try:
            with translated(self._server):
                entry = await find_record(self._server, self._keys, run)
        except RecordNotFound:
            raise not_found(run) from None
        if not _sees(viewer.tenant, entry):
            raise not_found(run)
        recorded = await self._read(entry)
        if recorded is None:
            raise not_found(run)
        return recorded

    async def list(self, tenant: str | None, after: Position | None) -> AsyncGenerator[tuple[Position, RecordedRun]]:
        """Those that the bus does not list, by the time of their acceptance, the newest first."""
        batch: list[RecordEntry] = []
        with translated(self._server):
            async for entry in newest_records(self._server, self._keys):
                place = Position(entry.at_ms, entry.run)
                if (after is None or place < after) and _sees(tenant, entry):
                    batch.append(entry)
                if len(batch) == _BATCH:
                    async for found in self._gone(batch):
                        yield found
                    batch = []
            async for found in self._gone(batch):
                yield found

    async def _gone(self, entries: list[RecordEntry]) -> AsyncGenerator[tuple[Position, RecordedRun]]:
        there = await read_summaries(self._server.client, self._keys, [entry.run for entry in entries])
        for entry, summary in zip(entries, there, strict=True):
            if summary is None and (recorded := await self._read(entry)):
                yield Position(entry.at_ms, entry.run), recorded

    async def _read(self, entry: RecordEntry) -> RecordedRun | None:
        """None for a record that cannot be read any more."""
        if entry.run in self._kept:
            self._kept.move_to_end(entry.run)
            return self._kept[entry.run]
        try:
            recorded = RecordedRun(entry, await load_outline(entry.blob_id, self._blobs))
        except (BlobError, Malformed, NotStorable):
            return None
        self._kept[entry.run] = recorded
        if len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        return recorded


def _sees(tenant: str | None, entry: RecordEntry) -> bool:
    return tenant is None or entry.tenant == tenant
