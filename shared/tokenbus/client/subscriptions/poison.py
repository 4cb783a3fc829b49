"""A group's events whose handlers fail: each is tried again with growing pauses, and buried after so many tries.

The tries are counted on the server, in a hash beside the group's lease, so they survive the process that made them. A
try counts when the handler has raised. A death counts as a try of every event that the worker may have had in hand; the
next worker counts each of these before it is handled, and lets it have its last try alone. So an event that ends its
process is buried after its tries, and not those that were handled beside it. (The first death costs no write per event
this way. With a single try nothing else tells the two apart, so it is the second death that buries.)
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from redis.exceptions import RedisError

from tokenbus.bus.dead_letters import RETURNED_MS, DeadLetter, dead_letter
from tokenbus.bus.keys import Keys
from tokenbus.bus.leases import Lease
from tokenbus.bus.server.server import Server, translated
from tokenbus.bus.server.stream_reader import Entry
from tokenbus.client.decode import OfRun, order_of
from tokenbus.client.subscriptions.ack_tracker import Again
from tokenbus.errors import ServerUnavailable
from tokenbus.events.sessions import SessionEvent
from tokenbus.events.topics import as_written

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
LOOK_S = 2.0
"""Interval between looks for events that were given back."""
_OPEN = "open:"
"""Begins the name of the field by which a living worker shows that it has events of the partition in hand."""
_UNCOUNTED, _COUNTED = 1, 2
"""Its values: whether those that it has in hand were counted before they were handled."""


class Numbered(OfRun, Protocol):
    """An event or a sentence."""

    @property
    def seq(self) -> int: ...


E = TypeVar("E", bound=Numbered | SessionEvent)
T = TypeVar("T")


class _Counts(msgspec.Struct):
    """The tries in one partition, as its owner knows them."""

    token: str
    tries: dict[str, int]
    suspects: int
    """How many further events a worker that died may have had in hand."""
    died: bool
    """Whether that death is not among the tries yet."""
    counted: bool
    """Whether the server knows that events are counted before they are handled."""


class Poison(Generic[E]):
    """Handles one worker's events: counts failed tries, and buries an event that has failed ``tries`` times."""

    def __init__(
        self,
        server: Server,
        keys: Keys,
        group: str,
        handler: Callable[[E], Awaitable[object]],
        *,
        tries: int,
        in_hand: int,
        stop_if: Callable[[], bool],
    ) -> None:
        """``group``: as the lease names it. ``in_hand``: maximum events that a worker of the group holds. ``stop_if``:
        whether the subscription is closed.
        """
        self._server = server
        self._keys = keys
        self._group = group
        self._handler = handler
        self._tries = tries
        self._in_hand = in_hand
        self._stop_if = stop_if
        self._partitions: dict[int, _Counts] = {}
        self._opening = asyncio.Lock()
        self._alone = asyncio.Lock()

    async def handle(self, event: E, lease: Lease, entry: str) -> Again | None:
        """Handle the event; return when to do that again, or None if it was handled or buried.

        ``entry``: its id in the topic. Without the server nothing is handled that may be poison.
        """
        try:
            counts = await self._counts(lease)
        except ServerUnavailable:
            return Again(FIRST_PAUSE_S)
        if not counts.suspects:
            if counts.counted:
                counts.counted = False
                await self._quietly(lease, {_OPEN + lease.token: _UNCOUNTED})
            return await self._try(event, lease, entry, counts, suspect=False)
        counts.suspects -= 1
        field = _field(event)
        if (tried := counts.tries.get(field, 0)) < self._tries - 1 and counts.died:
            tried = counts.tries[field] = tried + 1
        if tried < self._tries - 1:
            return await self._try(event, lease, entry, counts, suspect=True)
        async with self._alone:
            return await self._try(event, lease, entry, counts, suspect=True)

    async def leave(self, lease: Lease) -> None:
        """Sign off from a partition whose events in hand are done or left to another worker. Raises redis-py's
        errors.
        """
        counts = self._partitions.get(lease.partition)
        if counts and counts.token == lease.token:
            del self._partitions[lease.partition]
            await self._server.client.hdel(self._key(lease), _OPEN + lease.token)

    def _key(self, lease: Lease) -> str:
        return self._keys.failed_tries(lease.partition, self._group)

    async def _counts(self, lease: Lease) -> _Counts:
        async with self._opening:
            counts = self._partitions.get(lease.partition)
            if counts is None or counts.token != lease.token:
                key, mark = self._key(lease), _OPEN + lease.token
                with translated(self._server):
                    found: Any = await self._server.client.hgetall(key)
                    fields = {name.decode(): number for name, number in found.items()}
                    left = [name for name in fields if name.startswith(_OPEN) and name != mark]
                    await self._write(key, {mark: _COUNTED if left else _UNCOUNTED}, left)
                tries = {name: int(number) for name, number in fields.items() if not name.startswith(_OPEN)}
                died = any(int(fields[name]) == _UNCOUNTED for name in left)
                counts = _Counts(lease.token, tries, self._in_hand if left else 0, died, counted=bool(left))
                self._partitions[lease.partition] = counts
            return counts

    async def _write(self, key: str, fields: dict[str, int], gone: Iterable[str] = ()) -> None:
        pipe = self._server.client.pipeline(transaction=False)
        if gone := list(gone):
            pipe.hdel(key, *gone)
        if fields:
            pipe.hset(key, mapping=fields)
            pipe.pexpire(key, RETURNED_MS)
        await pipe.execute()

    async def _try(self, event: E, lease: Lease, entry: str, counts: _Counts, suspect: bool) -> Again | None:
        field, error = _field(event), None
        tried = counts.tries.get(field, 0)
        if tried < self._tries:
            if suspect:
                await self._count(lease, counts, field)
            try:
                await self._handler(event)
            except Exception as e:
                error = e
                if not suspect:
                    await self._count(lease, counts, field)
                tried = counts.tries[field]
                if tried < self._tries:
                    pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (tried - 1))
                    words = "%s: event %d of run %s failed, try %d of %d; again in %g s: %r"
                    log.warning(words, self._group, event.seq, order_of(event), tried, self._tries, pause, e)
                    return Again(pause)
            else:
                tried = 0
        if tried and not await self._buried(event, lease, entry, tried, error):
            return Again(FIRST_PAUSE_S)
        if counts.tries.pop(field, None):
            await self._quietly(lease, {}, [field])
        return None

    async def _count(self, lease: Lease, counts: _Counts, field: str) -> None:
        counts.tries[field] = counts.tries.get(field, 0) + 1
        await self._quietly(lease, {field: counts.tries[field]})

    async def _quietly(self, lease: Lease, fields: dict[str, int], gone: Iterable[str] = ()) -> None:
        """Write what this process knows anyway: if the server does not take it, another process counts less."""
        try:
            await self._write(self._key(lease), fields, gone)
        except (RedisError, OSError) as e:
            log.warning("%s: tries not counted on the server: %s", self._group, str(e) or type(e).__name__)

    async def _buried(self, event: E, lease: Lease, entry: str, tried: int, error: Exception | None) -> bool:
        why = repr(error) if error else "a process that handled it ended"
        topic: Any = self._group.partition(":")[0]
        letter = DeadLetter(
            reason=f"failed {tried} times: {why}",
            stage=f"group {self._group}",
            stream=self._keys.topic(lease.partition, topic),
            entry=entry,
            bytes=msgspec.json.encode(as_written(event)),
            run=event.run,
            seq=event.seq,
            group=self._group,
        )
        try:
            await dead_letter(self._server, self._keys, letter, stop_if=self._stop_if)
        except (RedisError, OSError):
            return False  # the subscription is closed; another worker buries it
        words = "%s: event %d of run %s is dead, and the run goes on without it: %s"
        log.error(words, self._group, event.seq, order_of(event), letter.reason, exc_info=error)
        return True


class Returned(Generic[T]):
    """Dead letters that were given back to a group, in its worker's partitions."""

    def __init__(self, server: Server, keys: Keys, group: str, decode: Callable[[str, Entry], T]) -> None:
        """``decode``: what gives the event of an entry of a stream. Raises Malformed."""
        self._server = server
        self._keys = keys
        self._group = group
        self._decode = decode
        self._looked_at = 0.0
        self._found: deque[tuple[str, Entry]] = deque()
        self._in_hand: dict[int, tuple[T, str, bytes]] = {}
        """By the identity of the event."""
        self._done: dict[str, list[bytes]] = {}

    async def look(self, partitions: Iterable[int]) -> None:
        """Delete what is done, and look for more if it is time. Raises redis-py's errors."""
        now = asyncio.get_running_loop().time()
        if self._looked_at and now - self._looked_at < LOOK_S:
            return
        pipe = self._server.client.pipeline(transaction=False)
        done, self._done = self._done, {}
        for stream, ids in done.items():
            pipe.xdel(stream, *ids)
        streams = [self._keys.returned(partition, self._group) for partition in partitions]
        for stream in streams:
            pipe.xrange(stream, count=32)
        try:
            replies: Any = await pipe.execute()
        except BaseException:
            self._done = done
            raise
        self._looked_at = now
        held = {(stream, entry) for _, stream, entry in self._in_hand.values()}
        self._found.clear()
        for stream, entries in zip(streams, replies[len(done) :], strict=True):
            self._found.extend((stream, entry) for entry in entries if (stream, entry[0]) not in held)

    @property
    def waiting(self) -> bool:
        """Whether there is something to take."""
        return bool(self._found)

    def take(self) -> T:
        """The next event that was found. Raises Malformed; the entry is deleted then."""
        stream, entry = self._found.popleft()
        try:
            event = self._decode(stream, entry)
        except BaseException:
            self._done.setdefault(stream, []).append(entry[0])
            raise
        self._in_hand[id(event)] = event, stream, entry[0]
        return event

    def done(self, event: object) -> bool:
        """Mark the event (the same object) as done; return False if it was not given back."""
        held = self._in_hand.pop(id(event), None)
        if held:
            self._done.setdefault(held[1], []).append(held[2])
        return held is not None

    async def close(self) -> None:
        """Delete what is done. Raises redis-py's errors."""
        self._looked_at = 0.0
        await self.look(())


def _field(event: Numbered | SessionEvent) -> str:
    return f"{order_of(event)}/{event.seq}"
