"""Reads a run with all child runs below it in the one order that the tree has for every reader.

The parser's commits write that order (`TreeEntry`), from the one on that begins the tree's first child. So a reader
reads the root's own log until the order begins. From there on it reads what the entries name, each from its run's log.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Any, Self

import msgspec

from tokenbus.bus.keys import Keys
from tokenbus.bus.run_record import STATUS, UNENDED, status_of
from tokenbus.bus.server.server import translated
from tokenbus.bus.server.stream_reader import Entry, Pages, id_key
from tokenbus.client.decode import public_event
from tokenbus.client.deployment import Deployment, Outage
from tokenbus.client.log_reader import LONGEST_LOOK_S, LOOK_S, LogReader
from tokenbus.client.tailing import StreamFeed
from tokenbus.errors import CursorAhead, CursorTrimmed, Malformed, RunLost, RunNotFound, ServerUnavailable
from tokenbus.events.child_runs import TreeEntry, child_id, path_to, root_of
from tokenbus.events.public import TERMINAL, ChildStarted, PublicEvent

COUNT = 256
_START = "0-0"
_CURSOR = re.compile(r"([0-9]{1,15}-[0-9]{1,9})\.([0-9]{1,15})((?:~[0-9]{1,9})*)")


class TreeCursor(msgspec.Struct, frozen=True):
    """A place in a tree: after the event ``seq`` of the run whose id is that of the top and ``below``."""

    entry: str
    """Where the order names that event, or named it before a fail-over; ``0-0``: before the order begins."""
    seq: int
    below: str = ""

    def __str__(self) -> str:
        return f"{self.entry}.{self.seq}{self.below}"

    @classmethod
    def parse(cls, text: str) -> TreeCursor:
        """Read what `str` of a cursor gives. Raises ValueError."""
        found = _CURSOR.fullmatch(text)
        if not found:
            raise ValueError(f"{text!r} is no cursor of a tree")
        return cls(found[1], int(found[2]), found[3])


class TreeStep(msgspec.Struct, frozen=True):
    """One event of a run of the tree."""

    event: PublicEvent
    path: tuple[str, ...]
    """The runs from the top down to the event's, both included: each is the parent of the next one."""
    cursor: TreeCursor
    """The place behind the event."""


async def follow_tree(
    deployment: Deployment, run: str, *, after: TreeCursor | None, wait_s: float | None, reconnect_s: float
) -> AsyncGenerator[TreeStep]:
    """Yield the events of the run and of all runs below it after a cursor, up to the end of the last one. Survives
    outages shorter than ``reconnect_s``. Raises as `TreeReader.read`.
    """
    outage = Outage(reconnect_s)
    async with TreeReader(deployment, run, after=after, wait_s=wait_s) as reader:
        while not reader.ended:
            try:
                steps = await reader.read()
            except ServerUnavailable as e:
                await outage.wait(e)
                continue
            outage.over()
            for step in steps:
                yield step


class TreeReader:
    """One reader of one tree. Use inside ``async with``; call `read` until `ended`."""

    def __init__(self, deployment: Deployment, run: str, *, after: TreeCursor | None, wait_s: float | None) -> None:
        """``run``: the top, which may be a child run itself."""
        self._deployment = deployment
        self._top = run
        self._root = root_of(run)
        self._after = after
        self._own: LogReader | None = None
        """Reads the root's log until the order begins."""
        if run == self._root and (after is None or after.entry == _START):
            own_after = -1 if after is None else after.seq
            self._own = LogReader(deployment, run, after=own_after, wait_s=wait_s)
            self._seqs = {run: own_after}
        else:
            self._seqs: dict[str, int] = {}
        """Of each run, the last event that was passed on here: a fail-over may let its place come again."""
        self._pages = Pages()
        self._of_root: list[PublicEvent] = []
        """What was read there, and is not passed on yet."""
        self._position: str | None = _START if after is None else None
        """The last entry of the order that was read; None: it must be found."""
        self._unread: deque[tuple[str, TreeEntry]] = deque()
        self._begun: set[str] | None = None if after else {run}
        """The runs below the top that were begun, and it; None: not known."""
        self._feed: StreamFeed | None = None
        self._wait_s = wait_s
        self._waited_s = 0.0
        self._look_s = LOOK_S
        self._known = False
        self._asks_for_end = after is not None
        """Whether the end may be near: the top has ended, or nothing has come for a while."""
        self.ended = False
        """Whether all runs of the tree have ended, and all their events are passed on or before the cursor."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave_feed()
        if self._own:
            await self._own.__aexit__(kind, error, trace)

    async def read(self) -> list[TreeStep]:
        """Return the next events, some hundred at most; empty if none came for a while.

        Raises CursorAhead if the tree has no event at the cursor; RunNotFound, RunLost, CursorTrimmed, Malformed and
        ServerUnavailable as `LogReader.read`, after the last of which it may be called again.
        """
        keys = await self._deployment.keys_of(self._root)
        if self._own:
            return await self._before_the_order(keys, self._own)
        if self._position is None:
            await self._locate(keys)
        while True:
            if steps := await self._of_entries(keys):
                self._known, self._look_s = True, LOOK_S
                return steps
            if await self._more(keys):
                continue
            if self._asks_for_end and await self._is_over(keys):
                # What was written before that look is in the order by now.
                if not await self._more(keys):
                    self.ended = True
                    return []
                continue
            if not await self._news(keys):
                self._asks_for_end = True
                return []

    async def is_at_end(self) -> bool:
        """Whether nothing follows the cursor, because all runs of the tree have ended. The reader is used up then.
        Raises as `read`.
        """
        keys = await self._deployment.keys_of(self._root)
        if self._own:
            with translated(self._deployment.server):
                last: list[Entry] = await self._deployment.server.client.xrevrange(keys.log(self._top), count=1)
            newest = public_event("", last[0]) if last else None
            over = isinstance(newest, TERMINAL) and newest.seq <= self._seqs[self._top]
            return over and await self._first(keys) is None
        if self._position is None:
            await self._locate(keys)
        if await self._of_entries(keys) or await self._more(keys):
            return False
        return await self._is_over(keys) and not await self._more(keys)

    # --- before the order begins ---------------------------------------------------------------------------------

    async def _before_the_order(self, keys: Keys, own: LogReader) -> list[TreeStep]:
        begin = await self._first(keys)
        if begin and self._after and self._after.seq > begin[1].last:  # a fail-over gave the event another place
            self._own, self._position = None, None
            return []
        if not self._of_root and (begin is None or self._seqs[self._top] < begin[1].last):
            self._of_root = await own.read()
        if begin is None:
            begin = await self._first(keys)  # after the root was read, before its events are passed on
        if own.from_archive and any(isinstance(event, ChildStarted) for event in self._of_root):
            raise RunNotFound(self._top)  # the archive has each run of the tree, and not the order
        events, self._of_root = self._of_root, []
        if begin is not None:
            events = [event for event in events if event.seq <= begin[1].last]
        steps = [self._step(event, _START) for event in events]
        if begin is None:
            self.ended = own.ended
        elif self._seqs[self._top] >= begin[1].last:
            await own.__aexit__(None, None, None)
            self._own, self._known = None, True
            self._position = begin[0]
            if self._begun is not None:
                self._begin_children(begin[1])
        return steps

    async def _first(self, keys: Keys) -> tuple[str, TreeEntry] | None:
        with translated(self._deployment.server):
            entries: list[Entry] = await self._deployment.server.client.xrange(keys.tree(self._root), count=1)
        return self._decoded(entries[0]) if entries else None

    # --- in the order --------------------------------------------------------------------------------------------

    async def _of_entries(self, keys: Keys) -> list[TreeStep]:
        """The events of the entries that were read."""
        steps: list[TreeStep] = []
        while self._unread and len(steps) < COUNT:
            place, entry = self._unread[0]
            if path_to(entry.run, self._top):
                try:
                    events = await self._events(keys, entry)
                except ServerUnavailable:
                    if steps:  # they are behind the reader already; the next call asks again
                        return steps
                    raise
                steps += [self._step(event, place) for event in events]
                if self._seqs.get(entry.run, -1) < entry.last and events:
                    continue  # there are more of them
                if self._begun is not None:
                    self._begin_children(entry)
            self._unread.popleft()
        return steps

    async def _events(self, keys: Keys, entry: TreeEntry) -> list[PublicEvent]:
        """The next events of an entry; none if all are passed on, or the run's log has expired."""
        known = self._seqs.get(entry.run, -1)
        first = id_key(entry.first)
        if known >= entry.last or first[1] > entry.last:
            return []
        log, events = keys.log(entry.run), list[PublicEvent]()
        begin = f"{first[0]}-{max(first[1], known + 1)}"
        while True:
            with translated(self._deployment.server):
                entries: list[Entry] = await self._deployment.server.client.xrange(log, begin, count=self._pages.count)
            entries = self._pages.fit(entries)
            for each in entries:
                event = public_event(log, each)
                if event.seq > entry.last:
                    return events
                if event.seq > known:
                    expected = max(known + 1, first[1])
                    if event.seq != expected:
                        raise CursorTrimmed(log, str(expected - 1), str(event.seq))
                    known = event.seq
                    events.append(event)
            if events or not entries:
                return events
            begin = f"({entries[-1][0].decode()}"

    async def _more(self, keys: Keys) -> bool:
        """Read stored entries of the order; whether there are any."""
        tree = keys.tree(self._root)
        if self._unread:
            return True
        with translated(self._deployment.server):
            entries: list[Entry] = await self._deployment.server.client.xrange(tree, f"({self._position}", count=COUNT)
        self._take(entries)
        return bool(entries)

    async def _news(self, keys: Keys) -> bool:
        """Wait for entries of the order; False after a while without."""
        assert self._position
        if self._feed is None:
            self._feed = self._deployment.hub.open_feed(keys.tree(self._root), self._position)
        try:
            entries = await self._feed.take(self._look_s)
        finally:
            self._leave_feed()
        self._take(entries)
        if not entries:
            self._waited_s += self._look_s
            self._look_s = min(2 * self._look_s, LONGEST_LOOK_S)
        return bool(entries)

    def _take(self, entries: list[Entry]) -> None:
        self._unread.extend(map(self._decoded, entries))
        if entries:
            self._position = entries[-1][0].decode()

    def _decoded(self, entry: Entry) -> tuple[str, TreeEntry]:
        place = entry[0].decode()
        try:
            return place, TreeEntry.decode(entry[1])
        except ValueError as e:
            raise Malformed(f"tree of {self._root} {place}", f"no entry of a tree: {e}") from None

    def _leave_feed(self) -> None:
        feed, self._feed = self._feed, None
        if feed:
            self._deployment.hub.close_feed(feed)

    def _step(self, event: PublicEvent, place: str) -> TreeStep:
        self._seqs[event.run] = event.seq
        if event.run == self._top and isinstance(event, TERMINAL):
            self._asks_for_end = True
        below = event.run[len(self._top) :]
        return TreeStep(event, path_to(event.run, self._top), TreeCursor(place, event.seq, below))

    def _begin_children(self, entry: TreeEntry) -> None:
        assert self._begun is not None
        self._begun.update(child_id(entry.run, block) for block in entry.begins)

    # --- the cursor, and the end ---------------------------------------------------------------------------------

    async def _locate(self, keys: Keys) -> None:
        """Find the entry that names the cursor's event. After a fail-over it may be another one than the cursor says.

        Raises CursorAhead, RunNotFound.
        """
        assert self._after
        run, client, tree = self._top + self._after.below, self._deployment.server.client, keys.tree(self._root)
        with translated(self._deployment.server):
            entries: list[Entry] = await client.xrange(tree, self._after.entry, count=COUNT)
            if entries and not self._names(self._decoded(entries[0])[1], run):
                entries = []
            begin = "-"
            while not entries:
                page: list[Entry] = await client.xrange(tree, begin, count=COUNT)
                if not page:
                    if not await client.exists(keys.log(self._root)):
                        raise RunNotFound(self._top)  # it existed before, so waiting is pointless
                    raise CursorAhead(tree, str(self._after), "none")
                found = [n for n, each in enumerate(page) if self._names(self._decoded(each)[1], run)]
                entries = page[found[0] :] if found else []
                begin = f"({page[-1][0].decode()}"
        self._seqs[run] = self._after.seq
        self._known = True
        self._take(entries)

    def _names(self, entry: TreeEntry, run: str) -> bool:
        assert self._after
        return entry.run == run and id_key(entry.first)[1] <= self._after.seq <= entry.last

    async def _is_over(self, keys: Keys) -> bool:
        """Whether the top and all runs that were begun below it have ended, or will never begin. Raises RunLost,
        RunNotFound.
        """
        if self._begun is None:
            self._begun = await self._all_begun(keys)
        pipe: Any = self._deployment.server.client.pipeline(transaction=False)
        pipe.exists(keys.log(self._top))
        pipe.hget(keys.run(self._top), STATUS)
        for run in sorted(self._begun - {self._top}):
            pipe.hget(keys.run(run), STATUS)
        with translated(self._deployment.server):
            log, top, *below = await pipe.execute()
        if status_of(top) in UNENDED:
            self._known = True
            return False
        if any(status_of(status) in UNENDED for status in below):
            return False
        if log:
            return True
        if self._known:
            raise RunLost(self._top)
        if self._wait_s is not None and self._waited_s >= self._wait_s:
            raise RunNotFound(self._top, self._deployment.unheard)
        return False

    async def _all_begun(self, keys: Keys) -> set[str]:
        begun, begin, tree = {self._top}, "-", keys.tree(self._root)
        while True:
            with translated(self._deployment.server):
                page: list[Entry] = await self._deployment.server.client.xrange(tree, begin, count=COUNT)
            for each in page:
                _, entry = self._decoded(each)
                if path_to(entry.run, self._top):
                    begun.update(child_id(entry.run, block) for block in entry.begins)
            if len(page) < COUNT:
                return begun
            begin = f"({page[-1][0].decode()}"
