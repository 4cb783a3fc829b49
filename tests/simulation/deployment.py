"""A deployment of the model: the number of processes of each kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from random import Random
from typing import Any

import msgspec
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from tests.simulation.bus import (
    MARK,
    MARKS,
    Channel,
    Fetcher,
    Node,
    Placing,
    Provider,
    Read,
    Reader,
    Stage,
    Step,
    Stream,
    Subscriber,
)
from tests.simulation.costs import Costs
from tests.simulation.engine import Clock, Host, Machine, Process
from tokenbus.bus.keys import Keys

START = ("server", "fetcher", "server", "fetcher", "server", "fetcher", "provider", "fetcher")
"""The processes that work in turn before a provider begins to answer: intake, the claim, the call, the head of the
answer.
"""
HOT = 20
"""The pace of a hot run, as a multiple of the others'."""


class Shape(msgspec.Struct, frozen=True):
    """The number of processes of each kind."""

    fetchers: int = 1
    normalizers: int = 1
    parsers: int = 1
    nodes: int = 1
    partitions: int = 8
    subscribers: int = 1
    cluster: bool = False
    local: bool = False
    """Whether the mock provider is a process of this machine. If not, chunks come from outside and cost nothing."""
    cores: int | None = None
    """Cores that all processes share. None: each process has a core of its own."""
    network_us: float = 0.0
    """Between two hosts, in one direction."""
    subscriber: str = "subscriber"
    """The costs of a subscriber: its own, or those of a gateway."""


class Runs(msgspec.Struct, frozen=True):
    paces: list[float]
    """Chunks a second of each run; 0: as fast as possible."""
    chunks: int
    """Chunks of a run without a pace."""
    begins: list[float]
    """When each run begins."""
    ends: list[float]
    """When each run would end, if its chunks came from its beginning on."""
    open: set[int] = set()
    """The runs that have begun before."""


@dataclass
class Outcome:
    waits_s: list[float]
    """Sorted; of chunks written after the warm-up."""
    received: list[tuple[float, float, int]]
    chunks: int
    seconds: float
    cpu_us: dict[str, float]
    """Per chunk, by kind of process."""
    busiest: dict[str, float]
    """Share of a core of the busiest process of each kind."""

    def wait_ms(self, share: float) -> float:
        """The latency that this share of the chunks does not exceed."""
        return self.waits_s[min(len(self.waits_s) - 1, int(share * len(self.waits_s)))] * 1e3 if self.waits_s else 0.0


def node_of(partitions: int, nodes: int) -> list[int]:
    """Each partition's node, if each node has an equal range of slots, as `tokenbus slots` computes it."""
    keys = Keys()
    slots = (key_slot(keys.topic(p, "raw").encode()) for p in range(partitions))
    return [slot * nodes // REDIS_CLUSTER_HASH_SLOTS for slot in slots]


class Deployment:
    """Processes and their connections."""

    def __init__(self, shape: Shape, costs: Costs, *, seed: int = 0) -> None:
        self.shape = shape
        self.clock = Clock()
        self.random = Random(seed)
        self._costs = costs
        self._shared = Machine(self.clock, shape.cores) if shape.cores else None
        self.kinds: dict[str, list[Process]] = {}
        nodes = [self._process(Node, "server") for _ in range(shape.nodes)]
        places = node_of(shape.partitions, shape.nodes)
        self.placing = placing = Placing(shape.partitions, nodes, places, shape.cluster)
        self.fetchers = [self._process(Fetcher, "fetcher", placing) for _ in range(shape.fetchers)]
        self.channels: dict[Process, list[Channel]] = {}
        self._stage("normalizer", shape.normalizers, placing.raw, placing.events)
        self._stage("parser", shape.parsers, placing.events, placing.visible)
        self.subscribers = [self._process(Subscriber, shape.subscriber) for _ in range(shape.subscribers)]
        for number, subscriber in enumerate(self.subscribers):
            self._read(subscriber, range(number, shape.partitions, shape.subscribers), placing.visible)

    def _process(self, kind: type, name: str, *more: object, **options: object) -> Any:
        hop_s = (self._costs.hop_us + self.shape.network_us) / 1e6
        host = Host(
            self._shared or Machine(self.clock, 1),
            hop_s,
            self._costs.cold_s,
            self._costs.sent_at,
            stretch=self._stretch,
        )
        made = kind(self.clock, self._costs.processes[name], host, *more, **options)
        self.kinds.setdefault(name, []).append(made)
        return made

    def _stretch(self) -> float:
        jitter = self._costs.jitter
        return self.random.lognormvariate(-jitter * jitter / 2, jitter) if jitter else 1.0

    def _stage(self, name: str, workers: int, inputs: list[Stream], outputs: list[Stream]) -> None:
        for number in range(workers):
            worker = self._process(Stage, name, outputs, joins=name == "parser")
            self._read(worker, range(number, self.shape.partitions, workers), inputs)

    def _read(self, reader: Reader, owned: Sequence[int], streams: list[Stream]) -> None:
        self.channels[reader] = self.placing.channels(reader, owned, streams)
        for channel in self.channels[reader]:
            reader.begin(channel)

    # --- what comes in ----------------------------------------------------------------------------------------------

    def feed(self, runs: Runs) -> None:
        provider = self._process(Provider, "provider", self.fetchers[0]) if self.shape.local else None
        for run, begin in enumerate(runs.begins):
            speak = partial(self._speak, run, runs, provider)
            if run in runs.open:
                self.clock.at(begin, partial(speak, begun=True))
            else:
                self.clock.at(begin, partial(self._start, run, provider, speak))

    def _start(self, run: int, provider: Provider | None, then: Callable[[], None]) -> None:
        """The path of a run to its provider: each process of `START` in turn, and the stages beside them."""
        partition = self.placing.partition(run)
        parts: dict[str, Process] = {
            "server": self.placing.node(partition),
            "fetcher": self.fetchers[run % len(self.fetchers)],
            **({"provider": provider} if provider else {}),
        }
        for kind in self.kinds:
            if kind not in ("server", "fetcher", "provider"):
                workers = self.kinds[kind]
                worker = workers[partition % len(workers)]
                worker.send(Step(worker.cost.run_us / 1e6, lambda: None))
        way = [parts[kind] for kind in START if kind in parts]
        share = {process: process.cost.run_us / 1e6 / way.count(process) for process in parts.values()}
        for process in reversed(way):
            then = partial(process.send, Step(share[process], then))
        then()

    def _speak(self, run: int, runs: Runs, provider: Provider | None, *, begun: bool = False) -> None:
        pace, clock = runs.paces[run], self.clock
        if not pace:
            assert provider, "a run without a pace is read from a provider on this machine"
            provider.pour(run, runs.chunks)
            return
        fetcher = self.fetchers[run % len(self.fetchers)]
        start = clock.now
        chunks = ceil((runs.ends[run] - runs.begins[run]) * pace)
        before = 0 if begun else MARKS

        def due(number: int) -> None:
            is_chunk = before <= number < before + chunks
            if provider:
                provider.plan(run, is_chunk, clock.now)
            else:
                fetcher.arrive([(run, clock.now if is_chunk else MARK)])
            if number + 1 < before + chunks + MARKS:
                clock.at(start + (number + 1) / pace, partial(due, number + 1))

        due(0)

    # --- what goes wrong --------------------------------------------------------------------------------------------

    def kill(self, kind: str, at: float, *, take_over_s: float) -> None:
        """End the first worker of a stage; after this time the second owns its partitions."""
        reader, other = [each for each in self.kinds[kind] if isinstance(each, Reader)][:2]

        def die() -> None:
            reader.dead = True

        def take_over() -> None:
            for channel in self.channels[reader]:
                if not self.shape.cluster and self.channels[other]:  # one read serves all partitions of a worker
                    into = self.channels[other][0]
                    into.streams = [*into.streams, *channel.streams]
                    for _, stream in channel.streams:
                        stream.channel = into
                    if into.waiting:
                        into.node.send(Read(into))
                else:
                    channel.reader, channel.waiting = other, False
                    other.begin(channel)
            self.channels[reader] = []

        self.clock.at(at, die)
        self.clock.at(at + take_over_s, take_over)

    # --- what comes out ---------------------------------------------------------------------------------------------

    def run(self, seconds: float, *, warm_s: float = 0.0) -> Outcome:
        """Run the clock, and summarise what was written after the warm-up."""
        self.clock.run(warm_s)
        before = {process: process.used.cpu_s for each in self.kinds.values() for process in each}
        self.clock.run(seconds)
        received = [h for subscriber in self.subscribers for h in subscriber.received if h[0] >= warm_s]
        last = max((written_at + wait for written_at, wait, _ in received), default=seconds)
        passed = min(seconds, last) - warm_s
        spent = {name: [process.used.cpu_s - before[process] for process in each] for name, each in self.kinds.items()}
        return Outcome(
            waits_s=sorted(wait for _, wait, _ in received),
            received=received,
            chunks=len(received),
            seconds=passed,
            cpu_us={name: sum(each) * 1e6 / max(1, len(received)) for name, each in spent.items()},
            busiest={name: max(each) / passed for name, each in spent.items()},
        )


def even(runs: int, pace: float, chunks: int) -> Runs:
    """Runs as `make bench` sends them: all with one pace, with starts that spread their chunks evenly."""
    stagger_s = (1 + 1 / runs) / pace if pace else 0.0
    begins = [number * stagger_s for number in range(runs)]
    # Half a pace early, so that rounding adds no chunk.
    ends = [begin + (chunks - 0.5) / pace if pace else 0.0 for begin in begins]
    return Runs([pace] * runs, chunks, begins, ends)


def arriving(
    seconds: float, chunks_per_s: float, *, seed: int, pace: float, chunks: float, burst: float, hot: float
) -> Runs:
    """Runs that arrive in Poisson bursts and end after a geometric number of chunks, with those that are open at the
    start.

    ``burst``: mean number of runs that arrive at once. ``hot``: share of all chunks that comes from runs of twenty
    times the pace.
    """
    random = Random(seed)
    found = Runs([], 0, [], [])
    for share, speed in ((1 - hot, pace), (hot, pace * HOT)):
        if not share:
            continue
        open_runs = chunks_per_s * share / speed
        length_s = chunks / speed
        for _ in range(round(open_runs)):  # the runs that are open at the start; the geometric distribution has no
            # memory
            found.open.add(len(found.paces))
            _add(found, random, random.random() / speed, length_s, speed)
        at = 0.0
        while (at := at + random.expovariate(open_runs / length_s / burst)) < seconds:
            for _ in range(1 + int(random.expovariate(1 / (burst - 1))) if burst > 1 else 1):
                _add(found, random, at + random.random() / speed, length_s, speed)
    return found


def _add(runs: Runs, random: Random, begin: float, length_s: float, pace: float) -> None:
    runs.paces.append(pace)
    runs.begins.append(begin)
    runs.ends.append(begin + random.expovariate(1 / length_s))
