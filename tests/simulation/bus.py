"""The bus as processes of the engine: provider, fetchers, stages, server nodes, subscribers.

A chunk is a pair: its run, and when the provider wrote it. On one server, a worker reads all of its partitions with one
command and commits them with one; in a Cluster each partition has its own read and its own commit, as in
`bus/server/stream_reader.py` and `bus/server/run_scripts.py`.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any
from zlib import crc32

from tests.simulation.costs import ProcessCost
from tests.simulation.engine import Clock, Done, Host, Process

Chunk = tuple[int, float]
Entry = list[Chunk]
MARK = -1.0
"""Used instead of the time for a provider event that begins or ends a run. It passes through the stages as a chunk
does, and no subscriber receives it.
"""
MARKS = 3
"""Number of these events before a run's chunks and after: message, block and ping begin; block and message end, and
their usage.
"""
TIMER_S = 0.001
"""A provider writes everything that is due within this time in one turn: the resolution of its timers."""
READ_ENTRIES = 256
SOCKET_CHUNKS = 400
"""Maximum chunks in one read of a socket: 64 KB."""
LINGER_S = 0.003
BUSY_WINDOW_S = 0.1
BUFFERED = 2_000
"""Chunks of one run that may wait between an unpaced provider and its fetcher: sockets and `BUFFER_BYTES`."""
TOPICS = 3
"""A public event of the parser is written to the run's log and to `chunks` and `visible`."""


def partition_of(run: int, partitions: int) -> int:
    """As `Keys.partition_of`, for a run with this number as its id."""
    return crc32(b"run-%d" % run) % partitions


@dataclass(frozen=True, eq=False)
class Script:
    """A command with one or more scripts: what they write, and who waits for the reply."""

    frames: int
    """Everything that is written: frames of runs, public events, copies of these."""
    writes: Sequence[tuple[Stream, Entry]]
    """By partition."""
    reply: Callable[[], None]


@dataclass(frozen=True, eq=False)
class Step:
    """Work of a process for a run's start, and the steps that follow."""

    seconds: float
    then: Callable[[], None]


@dataclass(frozen=True, eq=False)
class Read:
    """A blocking read of one channel."""

    channel: Channel


class Stream:
    """The input of one stage in a partition, or a topic."""

    def __init__(self) -> None:
        self.entries: deque[Entry] = deque()
        self.channel: Channel | None = None
        """The channel that reads it."""


class Channel:
    """The streams that one reader reads together at one node."""

    def __init__(self, reader: Reader, node: Node, streams: Sequence[tuple[int, Stream]]) -> None:
        self.reader = reader
        self.node = node
        self.streams = streams
        self.waiting = False
        for _, stream in streams:
            stream.channel = self

    def take(self) -> list[tuple[int, list[Entry]]]:
        """The next entries of each partition."""
        found: list[tuple[int, list[Entry]]] = []
        left = READ_ENTRIES
        for partition, stream in self.streams:
            if stream.entries and left > 0:
                count = min(left, len(stream.entries))
                found.append((partition, [stream.entries.popleft() for _ in range(count)]))
                left -= count
        return found


class Node(Process):
    """A server, or one node of a Cluster."""

    def handle(self, messages: list[Any]) -> tuple[int, int, float, Done]:
        scripts = [message for message in messages if isinstance(message, Script)]
        extra_s = sum(message.seconds for message in messages if isinstance(message, Step))
        items, frames = sum(len(script.writes) for script in scripts), sum(script.frames for script in scripts)
        return items, frames, extra_s, lambda: self._done(messages)

    def _done(self, messages: list[Any]) -> None:
        for message in messages:
            if isinstance(message, Script):
                written = [stream for stream, entry in message.writes if entry]
                for stream, entry in message.writes:
                    if entry:
                        stream.entries.append(entry)
                for stream in written:
                    self._serve(stream.channel)
                message.reply()
            elif isinstance(message, Step):
                message.then()
            else:
                message.channel.waiting = True
                self._serve(message.channel)

    def _serve(self, channel: Channel | None) -> None:
        if channel and channel.waiting and (found := channel.take()):
            channel.waiting = False
            channel.reader.send((channel, found))


class Fetcher(Process):
    """Reads sockets and flushes what it received, one flush at a time."""

    def __init__(self, clock: Clock, cost: ProcessCost, host: Host, placing: Placing) -> None:
        super().__init__(clock, cost, host)
        self._placing = placing
        self._pending: defaultdict[int, Entry] = defaultdict(list)
        self._flying = 0
        self._flushed_at = 0.0
        self._linger = self._urgent = False
        self._looked_at = self._busy_then = self._busy = 0.0
        self.on_read: Callable[[list[Chunk]], None] = lambda chunks: None

    def handle(self, messages: list[Any]) -> tuple[int, int, float, Done]:
        read: list[Chunk] = []
        steps: list[Step] = []
        for message in messages:
            if message == "written":
                self._flying -= 1
            elif message == "lingered":
                self._linger = False
            elif isinstance(message, Step):
                steps.append(message)
            else:
                read += message
        for chunk in read:
            self._pending[self._placing.partition(chunk[0])].append(chunk)
        self.on_read(read)
        each = Counter(run for run, _ in read)
        items, chunks = sum(-(-count // SOCKET_CHUNKS) for count in each.values()), len(read)
        self._urgent |= any(written_at == MARK for _, written_at in read)
        flushed: dict[int, Entry] = {}
        if self._pending and not self._flying and not self._lingers():
            flushed, self._pending = self._pending, defaultdict(list)
            self._flushed_at, self._urgent = self.clock.now, False
            items += sum(len({run for run, _ in entry}) for entry in flushed.values())
        return items, chunks, sum(step.seconds for step in steps), lambda: self._done(flushed, steps)

    def _lingers(self) -> bool:
        now, busy_s = self.clock.now, self.used.cpu_s + self.used.ready_s
        if now - self._looked_at >= BUSY_WINDOW_S:
            self._busy = (busy_s - self._busy_then) / (now - self._looked_at)
            self._looked_at, self._busy_then = now, busy_s
        until = self._flushed_at + LINGER_S * max(0.0, min(1.0, self._busy) - 0.5) / 0.5
        if self._urgent or until <= now:
            return False
        if not self._linger:
            self._linger = True
            self.clock.at(until, lambda: self.arrive("lingered"))
        return True

    def _done(self, flushed: dict[int, Entry], steps: Sequence[Step]) -> None:
        for step in steps:
            step.then()
        for node, parts in self._placing.by_command(flushed) if flushed else ():
            self._flying += 1
            frames = sum(len({run for run, _ in entry}) for _, entry in parts)
            writes = [(self._placing.raw[partition], entry) for partition, entry in parts]
            node.send(Script(frames, writes, lambda: self.send("written")))


class Reader(Process):
    """Reads channels: a stage's worker or a subscriber."""

    def begin(self, channel: Channel) -> None:
        """Read a channel from now on."""
        channel.node.send(Read(channel))


class Stage(Reader):
    """A worker of an ordered stage: reads, commits, reads again."""

    def __init__(
        self,
        clock: Clock,
        cost: ProcessCost,
        host: Host,
        outputs: Sequence[Stream],
        *,
        joins: bool,
    ) -> None:
        """``joins``: like the parser, which joins neighbouring chunks of a run to one public event."""
        super().__init__(clock, cost, host)
        self._outputs = outputs
        self._joins = joins

    def handle(self, messages: list[Any]) -> tuple[int, int, float, Done]:
        items = chunks = 0
        extra_s = 0.0
        commits: list[tuple[Channel, Script]] = []
        again: list[Channel] = []
        for message in messages:
            if isinstance(message, Step):
                extra_s += message.seconds
                continue
            channel, found = message
            if found is None:
                again.append(channel)
                continue
            parts = [(partition, [chunk for entry in entries for chunk in entry]) for partition, entries in found]
            frames = sum(len({run for run, _ in entry}) for _, entry in parts)
            items, chunks = items + frames, chunks + sum(len(entry) for _, entry in parts)
            writes = [(self._outputs[partition], self._written(entry)) for partition, entry in parts]
            reply = lambda channel=channel: self.send((channel, None))  # noqa: E731
            commits.append((channel, Script(frames * TOPICS if self._joins else frames, writes, reply)))
        return items, chunks, extra_s, lambda: self._done(commits, again)

    def _written(self, entry: Entry) -> Entry:
        return [chunk for chunk in entry if chunk[1] != MARK] if self._joins else entry

    def _done(self, commits: list[tuple[Channel, Script]], again: list[Channel]) -> None:
        for channel, script in commits:
            channel.node.send(script)
        for channel in again:
            channel.node.send(Read(channel))


class Subscriber(Reader):
    """Reads all partitions of a topic; records the latency of each chunk."""

    def __init__(self, clock: Clock, cost: ProcessCost, host: Host) -> None:
        super().__init__(clock, cost, host)
        self.received: list[tuple[float, float, int]] = []
        """For each chunk: when the provider wrote it, its latency, and its run."""

    def handle(self, messages: list[Any]) -> tuple[int, int, float, Done]:
        messages = [message for message in messages if not isinstance(message, Step)]
        events = [entry for _, found in messages for _, entries in found for entry in entries]
        items = sum(len({run for run, _ in entry}) for entry in events)
        chunks = [chunk for entry in events for chunk in entry]
        return items, len(chunks), 0.0, lambda: self._done([channel for channel, _ in messages], chunks)

    def _done(self, channels: list[Channel], chunks: list[Chunk]) -> None:
        now = self.clock.now
        self.received += [(written_at, now - written_at, run) for run, written_at in chunks]
        for channel in channels:
            channel.node.send(Read(channel))


class Provider(Process):
    """The mock provider, if it runs on the same machine: it writes what is due, or as much as is read."""

    def __init__(self, clock: Clock, cost: ProcessCost, host: Host, fetcher: Fetcher) -> None:
        super().__init__(clock, cost, host)
        self._fetcher = fetcher
        self._left: dict[int, list[bool]] = {}
        """The remaining events of each run without a pace, in reverse order: whether the event is a chunk."""
        self._unread: defaultdict[int, int] = defaultdict(int)
        self._planned: dict[int, list[tuple[int, bool]]] = {}
        """By tick of its timers."""
        self._idle = True
        fetcher.on_read = self._read

    def plan(self, run: int, is_chunk: bool, at: float) -> None:
        """Write this as soon as a timer says that it is due."""
        tick = ceil(at / TIMER_S)
        if tick not in self._planned:
            self.clock.at(tick * TIMER_S, lambda: self.arrive(self._planned.pop(tick)))
        self._planned.setdefault(tick, []).append((run, is_chunk))

    def pour(self, run: int, chunks: int) -> None:
        """Write a run as fast as it is read."""
        self._left[run] = [*[False] * MARKS, *[True] * chunks, *[False] * MARKS]
        self._more()

    def _read(self, chunks: list[Chunk]) -> None:
        for run, _ in chunks:
            self._unread[run] -= 1
        self._more()

    def _more(self) -> None:
        if self._idle and self._left:
            self._idle = False
            self.arrive("more")

    def handle(self, messages: list[Any]) -> tuple[int, int, float, Done]:
        steps = [message for message in messages if isinstance(message, Step)]
        outcomes: list[tuple[int, bool]] = [
            each for message in messages if isinstance(message, list) for each in message
        ]
        if "more" in messages:
            runs = [run for run in self._left if self._unread[run] < BUFFERED]
            outcomes += [(run, self._left[run].pop()) for run in runs]
            for run in runs:
                self._unread[run] += 1
            self._left = {run: left for run, left in self._left.items() if left}
            self._idle = not runs
        return 0, len(outcomes), sum(step.seconds for step in steps), lambda: self._done(outcomes, steps)

    def _done(self, outcomes: list[tuple[int, bool]], steps: Sequence[Step]) -> None:
        for step in steps:
            step.then()
        if outcomes:
            now = self.clock.now
            self._fetcher.send([(run, now if is_chunk else MARK) for run, is_chunk in outcomes])
        if not self._idle:
            if self._left:
                self.arrive("more")
            else:
                self._idle = True


@dataclass(eq=False)
class Placing:
    """The partition and node of each run."""

    partitions: int
    nodes: Sequence[Node]
    node_of: Sequence[int]
    """The node's index by partition."""
    cluster: bool
    raw: list[Stream] = field(default_factory=list)
    events: list[Stream] = field(default_factory=list)
    visible: list[Stream] = field(default_factory=list)
    _partition: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for streams in (self.raw, self.events, self.visible):
            streams += [Stream() for _ in range(self.partitions)]

    def partition(self, run: int) -> int:
        if (found := self._partition.get(run)) is None:
            found = self._partition[run] = partition_of(run, self.partitions)
        return found

    def node(self, partition: int) -> Node:
        return self.nodes[self.node_of[partition]]

    def by_command(self, parts: dict[int, Entry]) -> Iterable[tuple[Node, list[tuple[int, Entry]]]]:
        """The parts of one command: all partitions of one server, or each partition of a Cluster alone."""
        if self.cluster:
            return [(self.node(partition), [(partition, entry)]) for partition, entry in parts.items()]
        return [(self.nodes[0], list(parts.items()))]

    def channels(self, reader: Reader, owned: Sequence[int], streams: Sequence[Stream]) -> list[Channel]:
        if self.cluster:
            return [Channel(reader, self.node(p), [(p, streams[p])]) for p in owned]
        return [Channel(reader, self.nodes[0], [(p, streams[p]) for p in owned])] if owned else []
