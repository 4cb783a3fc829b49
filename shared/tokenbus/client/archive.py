"""The client of a deployment's archive, which its blob service serves: logs of ended runs.

Plain HTTP with the standard library, as for blobs. At most one piece of a log, and one event, are in memory.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable
from typing import TypeVar
from urllib.parse import urlencode

import msgspec

from tokenbus.blob_wire import (
    ARCHIVE_PATH,
    MAX_ANSWER_BYTES,
    ArchiveDeleted,
    ArchiveNames,
    ArchivePage,
    blob_error,
)
from tokenbus.client.blobs import Blobs
from tokenbus.client.decode import public_event
from tokenbus.errors import BlobNotFound, BlobUnavailable
from tokenbus.events.public import PublicEvent
from tokenbus.events.run_info import RunInfo

PAGE_BYTES = 4 * 2**20
"""More than a page of 256 summaries ever has."""
T = TypeVar("T")


class ArchivedLog:
    """An archived run: its summary, and its events after a cursor. Close it with `aclose`."""

    def __init__(self, info: RunInfo, lines: AsyncGenerator[list[bytes]]) -> None:
        self.info = info
        self._lines = lines

    async def read(self) -> list[PublicEvent]:
        """The next events; empty at the end of the log. Raises BlobUnavailable if it is cut short; Malformed."""
        lines = await anext(self._lines, list[bytes]())
        return [public_event(f"archived {self.info.run}", (b"event", {b"__data__": line})) for line in lines]

    async def aclose(self) -> None:
        """End the read."""
        await self._lines.aclose()


class Archive(Blobs):
    """Client of the archive; takes its address and token as `Blobs` does. Calls are not retried.

    All methods raise BlobUnavailable, BlobUnauthorized; and BlobRefused for what the archive does not accept.
    """

    async def put_log(self, lines: AsyncIterable[bytes]) -> RunInfo:
        """Store a log: a line with its `RunInfo`, then a line for each event. The same run is always the same log.

        Raises BlobStoreFull, BlobTooLarge, and whatever ``lines`` raises; nothing is stored then.
        """
        async with self._call("POST", ARCHIVE_PATH, body=lines) as call:
            return self._decoded(RunInfo, 201, *await call.answer(MAX_ANSWER_BYTES))

    async def open_log(self, run: str, *, after: int = -1) -> ArchivedLog | None:
        """The log of a run, with the events after this seq; None if the archive does not have it."""
        lines = self._lines(f"/log?{urlencode({'run': run, 'after': after})}")
        try:
            first = await anext(lines)
        except BlobNotFound:
            return None
        try:
            return ArchivedLog(msgspec.json.decode(first[0], type=RunInfo), lines)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, IndexError) as e:
            await lines.aclose()
            raise BlobUnavailable(self._url, f"the answer is not from an archive: {e}") from e

    async def page(
        self,
        *,
        tenant: str | None = None,
        since_ms: int = 0,
        until_ms: int | None = None,
        limit: int | None = None,
        oldest_first: bool = False,
        after: str | None = None,
    ) -> ArchivePage:
        """Some of the archived runs, by the time of their end. ``after``: `next` of the page before."""
        asked = {
            "tenant": tenant,
            "since_ms": since_ms or None,
            "until_ms": until_ms,
            "limit": limit,
            "oldest_first": "true" if oldest_first else None,
            "after": after,
        }
        return await self._ask(ArchivePage, "GET", "/runs", asked)

    async def runs(
        self, *, tenant: str | None = None, since_ms: int = 0, until_ms: int | None = None
    ) -> AsyncGenerator[RunInfo]:
        """All archived runs that ended in this time, the newest first."""
        after: str | None = None
        while True:
            page = await self.page(tenant=tenant, since_ms=since_ms, until_ms=until_ms, after=after)
            for info in page.runs:
                yield info
            if (after := page.next) is None:
                return

    async def delete_log(self, run: str) -> ArchiveDeleted:
        """Delete the log of a run for good; a recorder that has it in hand stores it no more."""
        return await self._ask(ArchiveDeleted, "DELETE", "/log", {"run": run})

    async def delete_logs(self, *, tenant: str | None, since_ms: int = 0, until_ms: int | None = None) -> int:
        """Delete all logs of a tenant, or of all, that ended in this time, also those whose key is gone; how many."""
        asked = {"tenant": tenant, "since_ms": since_ms or None, "until_ms": until_ms}
        return (await self._ask(ArchiveDeleted, "DELETE", "/runs", asked)).logs

    async def names(self, blob_id: str) -> bool:
        """Whether the log of an archived run names this blob."""
        return (await self._ask(ArchiveNames, "GET", "/names", {"blob_id": blob_id})).named

    async def _ask(self, kind: type[T], method: str, path: str, asked: dict[str, str | int | None]) -> T:
        query = urlencode({name: value for name, value in asked.items() if value is not None})
        async with self._call(method, f"{ARCHIVE_PATH}{path}?{query}") as call:
            return self._decoded(kind, 200, *await call.answer(PAGE_BYTES))

    def _decoded(self, kind: type[T], wanted: int, status: int, answer: bytes) -> T:
        if status != wanted:
            raise blob_error(status, answer, ARCHIVE_PATH)
        try:
            return msgspec.json.decode(answer, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            raise BlobUnavailable(self._url, f"the answer is not from an archive: {e}") from e

    async def _lines(self, path: str) -> AsyncGenerator[list[bytes]]:
        """The lines of an answer: the first one alone, then those that arrive together. Raises BlobNotFound."""
        async with self._call("GET", ARCHIVE_PATH + path) as call:
            if call.status != 200:
                raise blob_error(*await call.answer(MAX_ANSWER_BYTES), ARCHIVE_PATH)
            pending, begun = bytearray(), False
            while piece := await call.read():
                pending += piece
                *whole, rest = pending.split(b"\n")
                pending = bytearray(rest)
                lines = [bytes(line) for line in whole]
                if lines and not begun:
                    begun = True
                    yield [lines.pop(0)]
                if lines:
                    yield lines
