"""Reads one run's log from a cursor on: every event once, in order, none missing.

The log is a stream with entry ids ``<attempt>-<seq>``. A cursor is a ``seq`` alone; one pipeline over the attempts
locates its entry, and from then on the entry ids are the position. So a connection may break between any two reads.

Stored entries are read with plain reads, few of them at once over all readers of a client. A reader that has caught up
waits for new entries on the shared connection (tailing.py).
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from types import TracebackType
from typing import Self

from tokenbus.bus.keys import Keys
from tokenbus.bus.run_record import UNENDED, read_status
from tokenbus.bus.server.server import translated
from tokenbus.bus.server.stream_reader import Entry, Pages, id_key
from tokenbus.client.archive import ArchivedLog
from tokenbus.client.decode import is_end, public_event
from tokenbus.client.deployment import Deployment, Outage
from tokenbus.client.tailing import StreamFeed
from tokenbus.errors import BlobError, CursorAhead, CursorTrimmed, RunLost, RunNotFound, ServerUnavailable
from tokenbus.events.public import PublicEvent

LOOK_S = 1.0
LONGEST_LOOK_S = 16.0
"""A reader of a silent run checks that the run still exists: first after `LOOK_S`, then after twice as long each time.
"""
_LAST = 2**64 - 1


async def follow(
    deployment: Deployment, run: str, *, after: int, wait_s: float | None, reconnect_s: float, new: bool = False
) -> AsyncGenerator[PublicEvent]:
    """Yield the run's events after a cursor, up to the terminal one; see `LogReader`. Survives outages shorter than
    ``reconnect_s``.
    """
    outage = Outage(reconnect_s)
    async with LogReader(deployment, run, after=after, wait_s=wait_s, new=new) as reader:
        while not reader.ended:
            try:
                events = await reader.read()
            except ServerUnavailable as e:
                await outage.wait(e)
                continue
            outage.over()
            for event in events:
                yield event


class LogReader:
    """One reader of one run. Use inside ``async with``; call `read` until `ended`."""

    def __init__(
        self, deployment: Deployment, run: str, *, after: int, wait_s: float | None, new: bool = False
    ) -> None:
        """``after``: the last seq already known. ``wait_s``: how long the run may stay unknown to a server that
        answers; None: forever. ``new``: nothing is stored yet, most likely, so the reader does not look for it.
        """
        self._deployment = deployment
        self._run = run
        self._seq: int = after
        self._position: str | None = "0-0" if new and after < 0 else None
        self._reads_stored = self._position is None
        """Whether stored entries are read before the reader waits for new ones."""
        self._pages = Pages()
        self._feed: StreamFeed | None = None
        self._gap: CursorTrimmed | None = None
        self._wait_s = wait_s
        self._waited_s = 0.0
        self._look_s = LOOK_S
        self._known = False
        self._keys: Keys | None = None
        """Names of the run's keys in the partition where it was last looked up. Fixed once the run is found."""
        self._archived: ArchivedLog | None = None
        """What the events come from, once the server has none of them any more."""
        self.ended = False
        """Whether the terminal event was returned, or is at or before the cursor."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave_feed()
        if self._archived:
            await self._archived.aclose()

    async def read(self) -> list[PublicEvent]:
        """Return the next events, at most a few hundred; empty if none came for a while.

        Raises CursorTrimmed if events after the cursor were trimmed; CursorAhead if there is no event with the cursor's
        seq; RunNotFound if the run is unknown or has expired; RunLost if it was open and its keys are gone;
        Malformed for an entry that is not an event; BlobError if the archive may have the run and does not answer;
        ServerUnavailable, after which it may be called again.
        """
        if self._gap:
            raise self._gap
        if self._archived:
            return await self._from_archive(self._archived)
        await self._deployment.keys()  # the client may have been closed
        keys = self._keys = self._keys if self._known and self._keys else await self._deployment.keys_of(self._run)
        log = keys.log(self._run)
        if self._feed and self._feed.stream != log:  # guessed before the deployment existed, or the run is elsewhere
            self._leave_feed()
        if self._feed is None:
            try:
                entries = await self._stored(log) if self._reads_stored else []
            except (RunNotFound, CursorAhead):
                if not await self._in_archive(keys):
                    raise
                return []
            looked, self._reads_stored = self._reads_stored, True
            if self.ended:
                return []
            if not entries and looked:
                with suppress(BlobError):  # most likely the run has not begun yet
                    if await self._in_archive(keys):
                        return []
            if not entries and self._position is not None:
                self._feed = self._deployment.hub.open_feed(log, self._position)
        else:
            entries = await self._new(keys, self._feed)
        if not entries:
            return []
        self._known, self._keys = True, keys
        self._look_s = LOOK_S
        return self._in_order(log, entries)

    @property
    def from_archive(self) -> bool:
        """Whether the server has forgotten the run, and the events come from the archive."""
        return self._archived is not None

    async def _in_archive(self, keys: Keys) -> bool:
        """Whether the rest of the events is in the archive alone, and comes from there now."""
        archive = await self._deployment.archive()
        if archive is None:
            return False
        client = self._deployment.server.client
        async with self._deployment.hub.reads:
            with translated(self._deployment.server):
                status = await read_status(client, keys.run(self._run))
                if status in (*UNENDED, "awaited") or await client.exists(keys.log(self._run)):
                    return False
        self._archived = await archive.open_log(self._run, after=self._seq)
        if self._archived is None:
            return False
        self._known = True
        self._leave_feed()
        last = self._archived.info.events - 1
        if last < self._seq:
            raise CursorAhead(f"archived {self._run}", str(self._seq), str(last))
        self.ended = last == self._seq
        return True

    async def _from_archive(self, archived: ArchivedLog) -> list[PublicEvent]:
        events = await archived.read()
        if not events:
            raise CursorTrimmed(f"archived {self._run}", str(self._seq), "none")
        return self._numbered(f"archived {self._run}", events)

    def _leave_feed(self) -> None:
        feed, self._feed = self._feed, None
        if feed:
            self._deployment.hub.close_feed(feed)

    async def _stored(self, log: str) -> list[Entry]:
        server = self._deployment.server
        async with self._deployment.hub.reads:
            with translated(server):
                if self._position is None:
                    self._position = await self._locate(log)
                    if self.ended:
                        return []
                found: list[Entry] = await server.client.xrange(log, f"({self._position}", count=self._pages.count)
        return self._pages.fit(found)

    async def _new(self, keys: Keys, feed: StreamFeed) -> list[Entry]:
        requested_at = time.monotonic()
        entries = await feed.take(self._timeout_s())
        if not entries:
            self._waited_s += time.monotonic() - requested_at
            self._look_s = min(2 * self._look_s, LONGEST_LOOK_S)
            async with self._deployment.hub.reads:
                with translated(self._deployment.server):
                    gone = await self._look_for_run(keys)
            if gone and not await self._in_archive(keys):
                raise gone
        return entries

    async def _locate(self, log: str) -> str:
        """Find the id to read after: that of the last entry whose seq is not after the cursor, or just before it."""
        if self._seq < 0:
            return "0-0"
        client = self._deployment.server.client
        last: list[Entry] = await client.xrevrange(log, count=1)
        if not last:
            if not await client.exists((await self._deployment.keys_of(self._run)).run(self._run)):
                raise RunNotFound(self._run)  # it existed before, so waiting is pointless
            raise CursorAhead(log, str(self._seq), "none")
        last_attempt, last_seq = id_key(last[0][0].decode())
        if last_seq < self._seq:
            raise CursorAhead(log, str(self._seq), str(last_seq))
        if last_seq == self._seq:
            self.ended = is_end(public_event(log, last[0]))
            return f"{last_attempt}-{last_seq}"
        first: list[Entry] = await client.xrange(log, count=1)
        pipe = client.pipeline(transaction=False)
        for attempt in range(id_key(first[0][0].decode())[0], last_attempt + 1):
            pipe.xrange(log, f"{attempt}-{self._seq + 1}", f"{attempt}-{_LAST}", count=1)
        found: list[list[Entry]] = await pipe.execute()
        places = [id_key(entries[0][0].decode()) for entries in found if entries]
        attempt, seq = min(places, key=lambda place: place[1], default=(0, 1))
        return f"{attempt}-{seq - 1}"

    def _in_order(self, log: str, entries: list[Entry]) -> list[PublicEvent]:
        events = [public_event(log, entry) for entry in entries]
        self._position = entries[-1][0].decode()
        return self._numbered(log, events)

    def _numbered(self, log: str, found: list[PublicEvent]) -> list[PublicEvent]:
        """Those that come next. Raises CursorTrimmed for a gap, once the events before it were returned."""
        events: list[PublicEvent] = []
        for event in found:
            if event.seq > self._seq:
                if event.seq != self._seq + 1:
                    self._gap = CursorTrimmed(log, str(self._seq), str(event.seq))
                    if not events:
                        raise self._gap
                    break  # return the events before the gap first
                events.append(event)
                self._seq = event.seq
                self.ended = is_end(event)
        return events

    def _timeout_s(self) -> float:
        if self._known or self._wait_s is None:
            return self._look_s
        return max(0.001, min(self._look_s, self._wait_s - self._waited_s))

    async def _look_for_run(self, keys: Keys) -> RunLost | RunNotFound | None:
        """After silence: check that the run exists and may still produce events. Returns why it may not."""
        client = self._deployment.server.client
        if not self._known:
            await self._deployment.refresh()
            keys = self._keys = await self._deployment.keys_of(self._run)
        status = await read_status(client, keys.run(self._run))
        if status in UNENDED or await client.exists(keys.log(self._run)):
            self._known = True
            return None
        accepted = status not in (None, "awaited")  # an early cancel makes no run: its request may never come
        if self._known:
            return RunLost(self._run)
        if accepted or (self._wait_s is not None and self._waited_s >= self._wait_s):
            return RunNotFound(self._run, self._deployment.unheard)
        return None
