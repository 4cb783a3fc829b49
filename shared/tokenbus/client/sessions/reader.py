"""Reads a session in the one order that it has for every reader: its own events, and each run's at the run's place.

An event of the session that came while a run was open says behind which of the run's events its place is; what the
script that wrote it saw as the newest. So a later event of the run is in the run's log only after the session's event
is in the session's. A reader therefore looks for events of the session after it has read events of a run, and before
it passes these on.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import NamedTuple, Self

import msgspec

from tokenbus.bus.keys import DATA_FIELD, Keys
from tokenbus.bus.server.server import translated
from tokenbus.bus.server.stream_reader import Entry, Pages, id_key
from tokenbus.client.decode import public_event, session_event
from tokenbus.client.deployment import Deployment, Outage
from tokenbus.client.log_reader import LONGEST_LOOK_S
from tokenbus.client.tailing import StreamFeed
from tokenbus.errors import CursorAhead, CursorTrimmed, ServerUnavailable, SessionNotFound, SessionReplaced
from tokenbus.events.public import PublicEvent
from tokenbus.events.sessions import AnySessionEvent, RunEnded

_log = logging.getLogger(__name__)
COUNT = 256
_DATA = DATA_FIELD.encode()
_CURSOR = re.compile(r"(-1|[0-9]{1,15})\.(-1|[0-9]{1,15})\.([0-9a-f]{8})")


class SessionCursor(msgspec.Struct, frozen=True, order=True):
    """A place in a session: after its event ``session_seq``, and after the event ``run_seq`` of the run that was open
    then. ``made`` says which session of that name: one may be deleted and made again.
    """

    session_seq: int = -1
    run_seq: int = -1
    made: str = ""

    def __str__(self) -> str:
        return f"{self.session_seq}.{self.run_seq}.{self.made}"

    @classmethod
    def parse(cls, text: str) -> SessionCursor:
        """Read what `str` of a cursor gives. Raises ValueError."""
        found = _CURSOR.fullmatch(text)
        if not found:
            raise ValueError(f"{text!r} is no cursor of a session")
        return cls(int(found[1]), int(found[2]), found[3])


class SessionStep(msgspec.Struct, frozen=True):
    """One event of a session or of one of its runs, and the cursor behind it."""

    event: AnySessionEvent | PublicEvent
    cursor: SessionCursor


async def follow_session(
    deployment: Deployment, ref: str, name: str, *, after: SessionCursor, live: bool, reconnect_s: float
) -> AsyncGenerator[SessionStep]:
    """Yield the session's events after a cursor. Survives outages shorter than ``reconnect_s``. Raises SessionNotFound,
    SessionReplaced, CursorAhead, CursorTrimmed.
    """
    outage = Outage(reconnect_s)
    async with SessionReader(deployment, ref, name, after=after) as reader:
        while True:
            try:
                steps = await reader.read(live=live)
            except ServerUnavailable as e:
                await outage.wait(e)
                continue
            outage.over()
            for step in steps:
                yield step
            if not steps and not live:
                return


async def newest_cursor(deployment: Deployment, ref: str, name: str) -> SessionCursor:
    """The cursor behind all that is stored of a session. Raises SessionNotFound, ServerUnavailable, Malformed."""
    keys = await deployment.keys_of(ref)
    client, log = deployment.server.client, keys.log(ref)
    with translated(deployment.server):
        newest: list[Entry] = await client.xrevrange(log, count=1)
        made: bytes | None = await client.hget(keys.session(ref), "made")
        if not newest or made is None:
            raise SessionNotFound(name)
        event, run_seq = session_event(log, newest[0]), -1
        if event.run is not None and not isinstance(event, RunEnded):
            last: list[Entry] = await client.xrevrange(keys.log(event.run), count=1)
            run_seq = id_key(last[0][0].decode())[1] if last else -1
    return SessionCursor(event.session_seq, run_seq, made.decode())


class _Read(NamedTuple):
    """An event of the session that was read."""

    seq: int
    at_ms: int
    run: str | None
    """Open after it."""
    content: int
    """Its hash."""


class SessionReader:
    """One reader of one session. Use inside ``async with``."""

    def __init__(self, deployment: Deployment, ref: str, name: str, *, after: SessionCursor) -> None:
        self._deployment = deployment
        self._ref = ref
        self._name = name
        self._at = after
        self._keys: Keys | None = None
        self._run: _RunTail | None = None
        self._feeds: list[StreamFeed] = []
        """What wakes it up."""
        self._known: deque[AnySessionEvent] = deque()
        """Events of the session that were read, and have not been passed on."""
        self._read_up_to = after.session_seq
        self._pages = Pages()
        self._newest: deque[_Read] = deque(maxlen=COUNT)
        """The newest events of the session that were read: a fail-over may lose some of them."""
        self._told: dict[str, int] = {}
        """Of the newest runs before the present one, the last event that was passed on."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_feeds()

    async def read(self, *, live: bool) -> list[SessionStep]:
        """Return the next events, in order, some hundred at most; empty if none is stored and, if ``live``, none came
        for a while.

        Raises SessionNotFound, SessionReplaced, CursorAhead, CursorTrimmed, Malformed; and ServerUnavailable, after
        which it may be called again.
        """
        self._keys = self._keys or await self.begin()
        keys = self._keys
        while True:
            if not self._known:
                await self._look(keys)
            if steps := await self._of_session():
                return steps
            if self._run and (self._run.unread or await self._run.read()):
                await self._look(keys)  # after the run was read, before its events are passed on
                if not self._known:
                    return self._of_run(self._run.take())
            elif not live or not await self._news(keys):
                return []

    async def begin(self) -> Keys:
        """Find the session, and which run was open at the cursor. Raises as `read`, which calls it."""
        keys = await self._deployment.keys_of(self._ref)
        client, log = self._deployment.server.client, keys.log(self._ref)
        with translated(self._deployment.server):
            newest: list[Entry] = await client.xrevrange(log, count=1)
            made = await self._made(keys)
            if not newest:
                raise SessionNotFound(self._name)
            if self._at.made not in ("", made):
                raise SessionReplaced(self._name)
            self._at = msgspec.structs.replace(self._at, made=made)
            last = session_event(log, newest[0]).session_seq
            if self._at.session_seq > last:
                raise CursorAhead(log, str(self._at), str(last))
            if self._at.session_seq >= 0:
                entry = f"1-{self._at.session_seq}"
                found: list[Entry] = await client.xrange(log, entry, entry)
                if not found:
                    oldest: list[Entry] = await client.xrange(log, count=1)
                    raise CursorTrimmed(log, str(self._at), oldest[0][0].decode() if oldest else "none")
                event = self._remember(log, found[0])
                if event.run is not None and not isinstance(event, RunEnded):
                    self._run = _RunTail(self._deployment, keys, event.run, self._at.run_seq)
        return keys

    async def _made(self, keys: Keys) -> str:
        """Which session of the name there is. Raises SessionNotFound."""
        made: bytes | None = await self._deployment.server.client.hget(keys.session(self._ref), "made")
        if made is None:
            raise SessionNotFound(self._name)
        return made.decode()

    async def _look(self, keys: Keys) -> None:
        """Read stored events of the session."""
        log, client = keys.log(self._ref), self._deployment.server.client
        while True:
            after = f"(1-{self._read_up_to}" if self._read_up_to >= 0 else "-"
            with translated(self._deployment.server):
                pipe = client.pipeline(transaction=False)
                pipe.xrange(log, after, count=self._pages.count)
                # After the events: if it was made at the same time, they are of this session.
                pipe.hmget(keys.session(self._ref), ["made", "newest_ms"])
                entries, (made, newest_ms) = await pipe.execute()
            if made is None:
                raise SessionNotFound(self._name)
            if made.decode() != self._at.made:
                raise SessionReplaced(self._name)
            if await self._is_as_read(log, newest_ms, has_more=bool(entries)):
                break
            await self._go_back(keys)
        for entry in self._pages.fit(entries):
            seq, before = id_key(entry[0].decode())[1], self._read_up_to
            if seq != before + 1 and before >= 0:
                raise CursorTrimmed(log, f"1-{before}", entry[0].decode())
            self._known.append(self._remember(log, entry))
            self._read_up_to = seq

    def _remember(self, log: str, entry: Entry) -> AnySessionEvent:
        event = session_event(log, entry)
        run = None if isinstance(event, RunEnded) else event.run
        self._newest.append(_Read(event.session_seq, event.at_ms, run, hash(entry[1][_DATA])))
        return event

    async def _is_as_read(self, log: str, newest_ms: bytes | None, *, has_more: bool) -> bool:
        """Whether the newest event that was read is still there: a fail-over may have lost it, and another one may have
        its number now. ``newest_ms``: when the session's newest event was written. ``has_more``: it was not read yet.
        """
        if not self._newest:
            return True
        newest = self._newest[-1]
        if not has_more and newest_ms == b"%d" % newest.at_ms:
            return True
        entry = f"1-{newest.seq}"
        with translated(self._deployment.server):
            found: list[Entry] = await self._deployment.server.client.xrange(log, entry, entry)
        return hash(found[0][1][_DATA]) == newest.content if found else has_more  # or it was trimmed

    async def _go_back(self, keys: Keys) -> None:
        """To the newest event that the server has as it was read. What it has after that is passed on next."""
        log, first = keys.log(self._ref), self._newest[0].seq
        with translated(self._deployment.server):
            found: list[Entry] = await self._deployment.server.client.xrange(log, f"1-{first}", count=COUNT)
        there = {id_key(name.decode())[1]: hash(fields[_DATA]) for name, fields in found}
        while self._newest and there.get(self._newest[-1].seq) != self._newest[-1].content:
            self._newest.pop()
        lost_from = self._newest[-1].seq + 1 if self._newest else first
        _log.warning("session %s: the server lost events from %d to %d", self._ref, lost_from, self._read_up_to)
        self._read_up_to = lost_from - 1
        while self._known and self._known[-1].session_seq > self._read_up_to:
            self._known.pop()
        if self._at.session_seq <= self._read_up_to:
            return
        run = self._newest[-1].run if self._newest else None
        if run is None:
            self._run = None
        elif self._run is None or self._run.id != run:
            self._run = _RunTail(self._deployment, keys, run, self._told.get(run, -1))
        self._at = self._after(self._read_up_to, self._run.seq if self._run else -1)

    async def _of_session(self) -> list[SessionStep]:
        """The session's events that were read, each behind the run's events that precede it."""
        assert self._keys
        steps: list[SessionStep] = []
        while self._known and len(steps) < COUNT:
            event = self._known[0]
            if event.run is not None:
                if self._run is None or self._run.id != event.run:
                    self._leave_run()
                    self._run = _RunTail(self._deployment, self._keys, event.run, -1)
                    self._at = self._after(self._at.session_seq)
                place = -1 if event.run_seq is None else event.run_seq
                if self._run.seq < place and steps and not self._run.unread:
                    return steps  # a page, and behind the reader already: the next read may fail
                if self._run.seq < place and (self._run.unread or await self._run.read()):
                    of_run = self._of_run(self._run.take(place))
                    steps += of_run
                    if of_run and self._run.seq < place:
                        continue
                # If the run has nothing more up to there, its log has expired.
            self._known.popleft()
            self._at = self._after(event.session_seq, self._at.run_seq)
            if isinstance(event, RunEnded):
                self._leave_run()
                self._at = self._after(event.session_seq)
            steps.append(SessionStep(event, self._at))
        return steps

    def _leave_run(self) -> None:
        if self._run:
            self._told[self._run.id], self._run = self._run.seq, None
            if len(self._told) > 16:
                del self._told[next(iter(self._told))]

    async def _news(self, keys: Keys) -> bool:
        """Wait until the session or its open run has something new; False after a while without. Raises
        SessionNotFound, SessionReplaced.
        """
        hub = self._deployment.hub
        logs = [(keys.log(self._ref), f"1-{self._read_up_to}" if self._read_up_to >= 0 else "0-0")]
        logs += [(self._run.log, self._run.position)] if self._run else []
        self._feeds = [hub.open_feed(log, position) for log, position in logs]
        waiting = [asyncio.create_task(feed.take(LONGEST_LOOK_S)) for feed in self._feeds]
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            self._close_feeds()
        if any(task.result() for task in done):
            return True
        with translated(self._deployment.server):
            if await self._made(keys) != self._at.made:
                raise SessionReplaced(self._name)
        return False

    def _after(self, session_seq: int, run_seq: int = -1) -> SessionCursor:
        return SessionCursor(session_seq, run_seq, self._at.made)

    def _of_run(self, events: list[PublicEvent]) -> list[SessionStep]:
        steps: list[SessionStep] = []
        for event in events:
            self._at = self._after(self._at.session_seq, event.seq)
            steps.append(SessionStep(event, self._at))
        return steps

    def _close_feeds(self) -> None:
        feeds, self._feeds = self._feeds, []
        for feed in feeds:
            self._deployment.hub.close_feed(feed)


class _RunTail:
    """The events of a run that were read and have not been passed on."""

    def __init__(self, deployment: Deployment, keys: Keys, run: str, after: int) -> None:
        self.id = run
        self.seq = after
        """The last event that was passed on."""
        self.log = keys.log(run)
        self.position = "0-0"
        self.unread: deque[PublicEvent] = deque()
        self._server = deployment.server
        self._pages = Pages()

    async def read(self) -> bool:
        """Read what is stored; whether there is something to pass on."""
        while not self.unread:
            with translated(self._server):
                after, count = f"({self.position}", self._pages.count
                entries: list[Entry] = await self._server.client.xrange(self.log, after, count=count)
            entries = self._pages.fit(entries)
            if not entries:
                return False
            self.position = entries[-1][0].decode()
            events = (public_event(self.log, entry) for entry in entries)
            self.unread.extend(event for event in events if event.seq > self.seq)
        return True

    def take(self, upto: int | None = None) -> list[PublicEvent]:
        """Pass on what was read, up to this event."""
        taken: list[PublicEvent] = []
        while self.unread and (upto is None or self.unread[0].seq <= upto):
            taken.append(self.unread.popleft())
        if taken:
            self.seq = taken[-1].seq
        return taken
