"""Reads partitions of a public topic, each after its own position, and detects entries that were trimmed unread.

A stream drops its oldest entries first. So as long as any entry up to the position is kept, all later ones are too. The
server is asked for that only if it is in doubt: when a partition is acquired, when a read returned as many entries as
it may, and when the reader came back late. Otherwise a short read is proof by itself, because a topic keeps many more
than `COUNT` entries.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Literal, TypeAlias, TypeVar, cast, get_args

from tokenbus.bus.keys import Keys, SubscribedTopic
from tokenbus.bus.scripts import ScriptCall
from tokenbus.bus.scripts import topics as scripts
from tokenbus.bus.server.run_scripts import run_scripts
from tokenbus.bus.server.server import Server, translated
from tokenbus.bus.server.stream_reader import MAX_BLOCK_MS, Entry, StreamReader
from tokenbus.client.subscriptions.cursor import OLDEST
from tokenbus.core.nearest_name import unknown_name
from tokenbus.errors import CursorTrimmed
from tokenbus.events import public
from tokenbus.events.decisions import Decided
from tokenbus.events.sessions import SessionTopicEvent
from tokenbus.events.topics import UNKNOWN, TopicEvent

COUNT = 256
"""Maximum entries per partition and read. The settings do not allow a topic to keep as few."""
LATE_S = 1.0
_NOTHING = "none"
"""Replaces the oldest entry of an empty stream."""


async def ends(server: Server, keys: Keys, topic: SubscribedTopic) -> dict[int, str]:
    """Return the position of the newest entry of each partition. Raises ServerUnavailable."""
    streams = {keys.topic(p, topic): p for p in range(keys.partitions)}
    found = await _ask(server, list(streams), scripts.ends)
    return {streams[stream]: end for stream, end in found.items()}


class TopicReader:
    """Reads some partitions of a topic, each after its own position. One caller at a time."""

    def __init__(self, server: Server, keys: Keys, topic: SubscribedTopic, *, most: int) -> None:
        """``most``: maximum entries per read over all partitions, but at least one from each."""
        self._server = server
        self._keys = keys
        self._most = most
        self._stream: Callable[[int], str] = lambda partition: keys.topic(partition, topic)
        self._reader = StreamReader(server, count=self._count)
        self._positions: dict[str, str] = {}
        self._partitions: dict[str, int] = {}
        self._unverified: set[str] = set()
        self._read_at = time.monotonic()

    @property
    def _count(self) -> int:
        """Maximum entries of each partition. It follows the number of partitions, which may change."""
        return max(1, min(COUNT, self._most // self._keys.partitions))

    def oldest_after(self, gap: CursorTrimmed) -> Iterator[tuple[int, str]]:
        """Yield the partition with the gap and its oldest entry. Yields nothing if it is no longer read or the
        stream was deleted.
        """
        partition = self._partitions.get(gap.key)
        if partition is not None and gap.oldest != _NOTHING:
            yield partition, gap.oldest

    def take(self, partition: int, position: str) -> None:
        """Start reading this partition after ``position``."""
        stream = self._stream(partition)
        self._positions[stream] = position
        self._partitions[stream] = partition
        self._unverified.add(stream)
        self._reader.wake()

    def drop(self, partition: int) -> None:
        """Stop reading this partition."""
        stream = self._stream(partition)
        self._positions.pop(stream, None)
        self._partitions.pop(stream, None)
        self._reader.wake()

    async def read(self) -> list[tuple[int, list[Entry]]]:
        """Return new entries by partition; empty after 2 seconds, or if `take`, `drop` or `close` ends the wait.

        Raises ServerUnavailable; and CursorTrimmed, after which the next read continues at the oldest entry that is
        kept.
        """
        if time.monotonic() - self._read_at > LATE_S:
            self._unverified.update(self._positions)
        positions = dict(self._positions)
        count = self._reader.count = self._count
        with translated(self._server):
            offsets = {stream: "0-0" if at == OLDEST else at for stream, at in positions.items()}
            found = await self._reader.read(offsets, block_ms=MAX_BLOCK_MS)
        self._unverified.update(stream for stream, entries in found if len(entries) >= count)
        await self._verify_positions({s: positions[s] for s, _ in found if s in positions and s in self._unverified})
        self._read_at = time.monotonic()
        # A partition may have been dropped, or dropped and re-acquired at another position, during the read.
        found = [(s, entries) for s, entries in found if s in positions and self._positions.get(s) == positions[s]]
        for stream, entries in found:
            self._positions[stream] = entries[-1][0].decode()
            if len(entries) < count:
                self._unverified.discard(stream)
        return [(self._partitions[stream], entries) for stream, entries in found]

    async def close(self) -> None:
        """Abort the waiting read and release its connection."""
        await self._reader.close()

    async def _verify_positions(self, positions: dict[str, str]) -> None:
        held = {stream: at for stream, at in positions.items() if at != OLDEST}
        found = await _ask(
            self._server,
            list(held),
            lambda group: scripts.trimmed(group, cursors=[held[stream] for stream in group]),
        )
        for stream, oldest in found.items():
            if oldest and self._positions.get(stream) == positions[stream]:
                self._positions[stream] = OLDEST
                raise CursorTrimmed(stream, positions[stream], oldest)


async def _ask(server: Server, streams: Sequence[str], script: Callable[[Sequence[str]], ScriptCall]) -> dict[str, str]:
    """Run a script that answers per stream, in as few calls as the server's topology allows."""
    if not streams:
        return {}
    groups = [
        group[i : i + scripts.STREAMS]
        for group in server.read_groups(list(streams))
        for i in range(0, len(group), scripts.STREAMS)
    ]
    with translated(server):
        replies: list[Any] = await run_scripts(server, [script(group) for group in groups])
    return {
        stream: answer.decode()
        for group, reply in zip(groups, replies, strict=True)
        for stream, answer in zip(group, reply, strict=True)
    }


Runs: TypeAlias = Collection[str] | Callable[[str], bool]
"""Run ids (a set may change while in use), or a predicate on run ids."""

_BlockTopicKind = Literal["block_start", "image_preview", "block_progress", "block_complete", "tool_progress"]
_RunKind = Literal[
    "started", "answering", "retrying", "restarted", "usage", "completed", "incomplete", "failed", "cancelled"
]
_SessionKind = Literal["configured", "appended", "delivered", "returned", "run_ended", "deleted"]
Kind: TypeAlias = Literal["chunk", "decision"] | _SessionKind | _BlockTopicKind | _RunKind | public.BlockKind
"""The name of an event type or of a block kind."""
K = TypeVar("K", bound=TopicEvent)
Classes: TypeAlias = type[K] | Collection[type[K]]
Kinds: TypeAlias = Kind | type[K] | Collection[Kind | type[K]] | None
"""Event types and block kinds by name, or event classes."""


def _tag(kind: Any) -> str:
    return str(kind.__struct_config__.tag)


def _tags(union: object) -> frozenset[str]:
    return frozenset(_tag(kind) for kind in get_args(union) if kind not in UNKNOWN)


_EVENT_KINDS: dict[SubscribedTopic, frozenset[str]] = {
    "visible": _tags(public.ChunkTopicEvent),
    "chunks": _tags(public.ChunkTopicEvent),
    "blocks": _tags(public.BlockTopicEvent),
    "runs": _tags(public.RunTopicEvent),
    "decisions": frozenset([_tag(Decided)]),
    "sessions": _tags(SessionTopicEvent),
}
_BLOCK_KINDS: frozenset[str] = frozenset(get_args(public.BlockKind))


def kinds_of_topics() -> tuple[dict[SubscribedTopic, frozenset[str]], frozenset[str]]:
    """The event types of each topic, and the kinds of blocks, for clients in other languages."""
    return _EVENT_KINDS, _BLOCK_KINDS


class Selection:
    """A filter on the events of one topic.

    ``kinds`` names event types (``block_complete``, ``failed``, or their classes), block kinds (``text``,
    ``tool_call``), or both; an event of a block must then match both. None: all events.
    """

    def __init__(self, topic: SubscribedTopic, kinds: Kinds[Any] = None, runs: Runs | None = None) -> None:
        """Raises ValueError for a kind that this topic never carries; such a subscription would stay silent forever."""
        events = _EVENT_KINDS[topic]
        blocks = _BLOCK_KINDS if topic in ("visible", "chunks", "blocks") else frozenset[str]()
        named = _names(kinds)
        for kind in sorted(named - events - blocks):
            raise ValueError(f"kinds of {topic}: {unknown_name(kind, [*sorted(events), *sorted(blocks)])}")
        self._blocks = named & blocks or blocks
        if kinds is None or named & events:
            self._events = named & events or events
        else:
            self._events = events - {_tag(public.ToolProgress)} if named else frozenset[str]()
        self._unknown = kinds is None
        self._wants_run = _one_of([runs] if isinstance(runs, str) else runs) if runs is not None else None

    def wants(self, event: TopicEvent) -> bool:
        """Whether the subscriber wants this event. Raises whatever the predicate on runs raises."""
        if isinstance(event, UNKNOWN):
            if not self._unknown:
                return False
        elif _tag(event) not in self._events or (
            isinstance(event, public.Chunk | public.BlockEvent) and event.kind not in self._blocks
        ):
            return False
        return self._wants_run is None or (event.run is not None and self._wants_run(event.run))


def _names(kinds: Kinds[Any]) -> frozenset[str]:
    if kinds is None:
        return frozenset()
    each = [kinds] if isinstance(kinds, str | type) else cast("Collection[object]", kinds)
    return frozenset(
        _tag(kind) if isinstance(kind, type) and hasattr(kind, "__struct_config__") else str(kind) for kind in each
    )


def _one_of(runs: Runs) -> Callable[[str], bool]:
    return runs if callable(runs) else lambda run: run in runs
