"""Discrete events: a clock, machines with cores, and processes that work in turns of an event loop.

A process sleeps until a message arrives, waits for a core, handles all messages that have arrived by then in one turn,
and sends what results when the turn ends. So batches grow with load by themselves, as they do in the real workers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from tests.simulation.costs import ProcessCost

Done = Callable[[], None]
"""Called when a turn sends and writes what results."""


class Clock:
    """Runs what is due, in the order of time and then of scheduling, so that a run repeats exactly."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Done]] = []
        self._scheduled = 0

    def at(self, when: float, do: Done) -> None:
        """Schedule a call."""
        self._scheduled += 1
        heappush(self._due, (when, self._scheduled, do))

    def after(self, seconds: float, do: Done) -> None:
        """Schedule a call."""
        self.at(self.now + seconds, do)

    def run(self, until: float) -> None:
        """Run everything that is due up to this time."""
        while self._due and self._due[0][0] <= until:
            self.now, _, do = heappop(self._due)
            do()
        self.now = until


class Machine:
    """Cores that processes share. A turn is not preempted; a core takes processes in the order in which they woke."""

    def __init__(self, cores: int) -> None:
        self._free = cores
        self._ready: deque[Process] = deque()

    def want(self, process: Process) -> None:
        """Run the process's next turn as soon as a core is free."""
        self._ready.append(process)
        self._next()

    def leave(self) -> None:
        """A turn is over."""
        self._free += 1
        self._next()

    def _next(self) -> None:
        while self._free and self._ready:
            self._free -= 1
            self._ready.popleft().turn()


@dataclass(frozen=True)
class Host:
    """Where a process runs."""

    machine: Machine
    hop_s: float
    """From sending a message until its receiver is ready to run."""
    cold_s: float = 0.005
    """See `Costs`, as of the next one."""
    sent_at: float = 0.7
    stretch: Callable[[], float] = lambda: 1.0
    """How much longer than its CPU the next turn takes."""


@dataclass
class Used:
    """What a process did so far."""

    wakes: int = 0
    cold: float = 0.0
    items: int = 0
    chunks: int = 0
    cpu_s: float = 0.0


class Process(ABC):
    """One single-threaded process. Subclasses handle messages."""

    def __init__(self, clock: Clock, cost: ProcessCost, host: Host) -> None:
        self.clock = clock
        self.used = Used()
        self.dead = False
        self._cost = cost
        self._host = host
        self._inbox: list[Any] = []
        self._asleep = True
        self._slept = True
        self._cold = 1.0
        self._slept_at = 0.0

    def send(self, message: Any) -> None:
        """Deliver a message after the hop."""
        self.clock.after(self._host.hop_s, lambda: self.arrive(message))

    def arrive(self, message: Any) -> None:
        """A message is there."""
        if self.dead:
            return
        self._inbox.append(message)
        if self._asleep:
            self._asleep, self._slept = False, True
            self._cold = min(1.0, (self.clock.now - self._slept_at) / self._host.cold_s)
            self._host.machine.want(self)

    def turn(self) -> None:
        """Handle what has arrived."""
        messages, self._inbox = self._inbox, []
        items, chunks, done = self.handle(messages)
        used, cost = self.used, self._cost
        seconds = cost.of(self._slept, self._cold, items, chunks)
        used.wakes += self._slept
        used.cold += self._cold
        used.items += items
        used.chunks += chunks
        used.cpu_s += seconds
        self._slept, self._cold = False, 0.0
        seconds *= self._host.stretch()
        self.clock.after(seconds * self._host.sent_at, lambda: None if self.dead else done())
        self.clock.after(seconds, self._over)

    @abstractmethod
    def handle(self, messages: list[Any]) -> tuple[int, int, Done]:
        """Take all messages; return the items and chunks that they cost, and what to do when the turn ends."""

    def _over(self) -> None:
        if self._inbox:
            self._host.machine.want(self)
        else:
            self._asleep, self._slept_at = True, self.clock.now
        self._host.machine.leave()
