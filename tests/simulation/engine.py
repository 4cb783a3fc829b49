"""Discrete events: a clock, machines with cores, and processes that work in turns of an event loop.

A process sleeps until a message arrives, waits for a core, handles all messages that have arrived by then in one turn,
and sends its results near the end of the turn. So batches grow with load by themselves, as in the real workers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import exp
from typing import Any

from tests.simulation.costs import ProcessCost

Done = Callable[[], None]
"""Called when a turn sends; writes the results."""
SLICE_S = 0.0014
"""How long Linux runs a process while others wait: the base slice of its scheduler on two cores."""
TICK_S = 0.004
"""How often the scheduler checks whether an idle core can take over waiting work."""
MIGRATION_S = 0.0005
"""The cost that the scheduler assumes for a move to another core: a process that ran within this time stays, and a core
that is usually idle for less does not look for work.
"""


class Clock:
    """Runs what is due, in the order of time and then of scheduling, so that a run repeats exactly."""

    def __init__(self) -> None:
        self.now = 0.0
        self.core: Core | None = None
        """The core of the process that sends at this moment."""
        self._due: list[tuple[float, int, Done]] = []
        self._scheduled = 0

    def at(self, when: float, do: Done) -> None:
        self._scheduled += 1
        heappush(self._due, (when, self._scheduled, do))

    def after(self, seconds: float, do: Done) -> None:
        self.at(self.now + seconds, do)

    def run(self, until: float) -> None:
        """Run everything that is due up to this time."""
        while self._due and self._due[0][0] <= until:
            self.now, _, do = heappop(self._due)
            do()
        self.now = until


@dataclass(eq=False)
class Core:
    """One core, its queue of waiting processes, and how long it is usually idle."""

    running: Process | None = None
    waiting: deque[Process] = field(default_factory=deque)
    idle_since: float = 0.0
    usually_idle_s: float = 0.001


class Machine:
    """Cores that processes share, as on Linux: each core has a queue of its own.

    A process that wakes takes an idle core, its last one if possible. If none is idle, it waits for the core of the
    process that woke it, or for its last one, and preempts the process there. It stays there even if another core
    becomes idle: that core looks for work only if it is usually idle for long enough, and at the next tick. A process
    keeps its core while it has work and its slice lasts.
    """

    def __init__(self, clock: Clock, cores: int) -> None:
        self._clock = clock
        self._cores = [Core() for _ in range(cores)]
        self._ticks = False

    def wake(self, process: Process, waker: Core | None) -> None:
        """Run the process as soon as it gets a core."""
        last = process.core
        if last is None or last.running:
            idle = [core for core in self._cores if not core.running]
            if idle:
                last = idle[0]
            elif waker in self._cores and not waker.waiting:
                last = waker
            elif last is None:
                last = self._cores[0]
        self.enqueue(process, last)

    def enqueue(self, process: Process, core: Core) -> None:
        """Put the process into the queue of this core."""
        process.core = core
        core.waiting.append(process)
        if core.running is None:
            core.usually_idle_s += (min(self._clock.now - core.idle_since, 0.002) - core.usually_idle_s) / 8
            self._next(core)
        elif core.running.preempt():
            core.waiting.remove(process)
            core.waiting.appendleft(process)
            self.leave(core)
        elif len(self._cores) > 1 and not self._ticks:
            self._ticks = True
            self._clock.at((self._clock.now // TICK_S + 1) * TICK_S, self._tick)

    def leave(self, core: Core) -> None:
        core.running = None
        core.idle_since = self._clock.now
        if not core.waiting and core.usually_idle_s >= MIGRATION_S:
            self._pull(core)
        self._next(core)

    def _next(self, core: Core) -> None:
        if core.waiting:
            core.running = core.waiting.popleft()
            core.running.proceed()

    def _pull(self, core: Core) -> None:
        for other in self._cores:
            for process in other.waiting:
                if self._clock.now - process.ran_at >= MIGRATION_S:
                    other.waiting.remove(process)
                    process.core = core
                    core.waiting.append(process)
                    return

    def _tick(self) -> None:
        self._ticks = False
        for core in self._cores:
            if not core.running:
                self._pull(core)
                self._next(core)
        if any(core.waiting for core in self._cores):
            self._ticks = True
            self._clock.after(TICK_S, self._tick)


@dataclass(frozen=True)
class Host:
    """The place of a process."""

    machine: Machine
    hop_s: float
    """From sending a message until its receiver is ready to run."""
    cold_s: float = 0.002
    """See `Costs`; this is the value for the next turn."""
    sent_at: float = 0.8
    stretch: Callable[[], float] = lambda: 1.0
    """Factor from CPU to duration of the next turn."""


@dataclass
class Used:
    """What a process did so far."""

    turns: int = 0
    cold: float = 0.0
    items: int = 0
    chunks: int = 0
    cpu_s: float = 0.0
    ready_s: float = 0.0
    """Time in which it waited for a core."""


class Process(ABC):
    """One single-threaded process. Subclasses handle messages."""

    def __init__(self, clock: Clock, cost: ProcessCost, host: Host) -> None:
        self.clock = clock
        self.used = Used()
        self.dead = False
        self.cost = cost
        self._host = host
        self._inbox: list[Any] = []
        self._asleep = True
        self._slept_at = float("-inf")
        self._cold = 0.0
        self._piece = 0
        self._piece_at = 0.0
        """The start and the number of its current piece of work; a preempted piece does not end."""
        self._ready_at = 0.0
        self.core: Core | None = None
        """Its core, or the last one that it had."""
        self.ran_at = float("-inf")
        self._slice_s = 0.0
        """The rest of its slice."""
        self._steps: deque[tuple[float, Done]] = deque()
        """The rest of its turn: seconds, and the results."""

    def send(self, message: Any) -> None:
        """Deliver a message after the hop."""
        waker = self.clock.core
        self.clock.after(self._host.hop_s, lambda: self.arrive(message, waker))

    def arrive(self, message: Any, waker: Core | None = None) -> None:
        """Receive a message. ``waker``: the core of the process that sent it."""
        if self.dead:
            return
        self._inbox.append(message)
        if self._asleep:
            self._asleep = False
            self._cold = 1.0 - exp((self._slept_at - self.clock.now) / self._host.cold_s)
            self._ready_at = self.clock.now
            self._host.machine.wake(self, waker)

    def proceed(self) -> None:
        """Start to work: it has a core, for a slice."""
        self.used.ready_s += self.clock.now - self._ready_at
        self._slice_s = SLICE_S
        self._work()

    def _work(self) -> None:
        if not self._steps:
            self._begin()
        seconds, _ = self._steps[0]
        self._piece += 1
        piece = self._piece
        self._piece_at = self.clock.now
        self.clock.after(min(seconds, self._slice_s), lambda: self._worked() if piece == self._piece else None)

    def preempt(self) -> bool:
        """Wait again, first in line after the process that woke; False at the beginning of a turn."""
        core = self.core
        if not core or not self._steps:
            return False
        self._piece += 1
        ran = self.clock.now - self._piece_at
        seconds, done = self._steps[0]
        self._steps[0] = max(0.0, seconds - ran), done
        self.ran_at = self._ready_at = self.clock.now
        core.waiting.appendleft(self)
        return True

    def _begin(self) -> None:
        """Begin a turn with all messages that have arrived."""
        messages, self._inbox = self._inbox, []
        items, chunks, extra_s, done = self.handle(messages)
        used = self.used
        seconds = self.cost.of(self._cold, items, chunks) + extra_s
        used.turns += 1
        used.cold += self._cold
        used.items += items
        used.chunks += chunks
        used.cpu_s += seconds
        self._cold = 0.0
        seconds *= self._host.stretch()
        sends = seconds * self._host.sent_at
        self._steps.append((sends, lambda: None if self.dead else done()))
        self._steps.append((seconds - sends, lambda: None))

    def _worked(self) -> None:
        seconds, done = self._steps[0]
        worked = min(seconds, self._slice_s)
        self._slice_s -= worked
        if worked < seconds:
            self._steps[0] = seconds - worked, done
        else:
            self._steps.popleft()
            self.clock.core = self.core
            done()
            self.clock.core = None
        core = self.core
        assert core
        self.ran_at = self.clock.now
        if not self._steps and not self._inbox:
            self._asleep, self._slept_at = True, self.clock.now
            self._host.machine.leave(core)
        elif self._slice_s <= 0.0 and core.waiting:
            self._ready_at = self.clock.now
            core.waiting.append(self)
            self._host.machine.leave(core)
        else:
            if self._slice_s <= 0.0:
                self._slice_s = SLICE_S
            self._work()

    @abstractmethod
    def handle(self, messages: list[Any]) -> tuple[int, int, float, Done]:
        """Handle all messages; return their cost in items and chunks, further seconds, and the action for the moment
        when the turn sends.
        """
