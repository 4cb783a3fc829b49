"""The faults that a seed injects: what networks, proxies and servers do to connections, and what befalls workers."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count

from tests.simulated_faults.fleet import Endpoints, Workers
from tests.simulated_faults.virtual import VirtualLoop, Wire, command

_ERRORS = (
    b"ERR upstream failure",
    b"LOADING Redis is loading the dataset in memory",
    b"BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
    b"NOSCRIPT No matching script. Please use EVAL.",
)
_DONE_ERROR = _ERRORS[0]
"""What a proxy says of a command that the server has executed."""
_PAUSES_S = (0.1, 0.4, 1.2)
"""Mean times between two faults; a seed has one of them."""
_SHARES = (0.1, 0.3, 1.0)
"""Shares of the connections that one fault hits."""

_LOSING = 0.25
"""Share of the seeds in which the server loses writes, too."""
_LOSSES_S = (0.0, 0.02, 0.1, 0.5, 2.0)
"""How long before a fail-over the last write was that is not lost."""
_LOOK_S = 0.02


class Faults:
    """Each fault has a number and chances of its own, so that the others are the same without it."""

    def __init__(
        self,
        loop: VirtualLoop,
        workers: Workers,
        endpoints: Endpoints,
        *,
        seed: int,
        only: Sequence[str] = (),
        numbers: Sequence[int] | None = None,
    ) -> None:
        """``only``: the names of the faults to inject; empty: all. ``numbers``: theirs; None: all."""
        self._loop, self._workers, self._endpoints = loop, workers, endpoints
        self._seed, self._numbers = seed, numbers
        self._chance = random.Random(f"{seed} faults")
        kinds: dict[str, tuple[int, Callable[[], object]]] = {
            "slow server": (3, self._slow_server),
            "cut": (4, self._cut),
            "lose replies": (4, self._lose_replies),
            "hold up": (4, lambda: self._hold(up=True)),
            "hold down": (6, lambda: self._hold(up=False)),
            "half open": (2, self._silence),
            "error": (4, lambda: self._answer_with_errors(done=False)),
            "error after all": (3, lambda: self._answer_with_errors(done=True)),
            "refuse": (1, self._refuse),
            "restart server": (2, self._restart_server),
            "reset storm": (1, self._reset_storm),
            "kill": (2, self._kill),
            "stop": (2, self._stop),
            "wrong clock": (1, self._set_clock_wrong),
            "cut answer": (1, self._cut_answer),
        }
        if self._chance.random() < _LOSING or "lose writes" in only:
            kinds["lose writes"] = (2, self._lose_writes)
        assert kinds.keys() >= set(only), f"the faults are {', '.join(kinds)}"
        self._kinds = {name: kinds[name] for name in only or kinds}
        """By name: how often, relative to the others, and what it does."""
        self.met: dict[int, str] = {}
        """The faults so far by number, with their times."""
        self.lost_writes = False
        self._written: deque[tuple[float, int]] = deque(maxlen=round(_LOSSES_S[-1] / _LOOK_S) + 1)
        """When the server had written how much, oldest first."""

    async def run(self, seconds: float) -> None:
        """Inject faults for this time, then repair all."""
        loop = self._loop
        until, pause_s = loop.now + seconds, self._chance.choice(_PAUSES_S)
        if "lose writes" in self._kinds:
            self._look(until)
        for number in count():
            self._chance = chance = random.Random(f"{self._seed} fault {number}")
            await asyncio.sleep(min(chance.expovariate(1 / pause_s), 4.0))
            if loop.now >= until:
                break
            name = chance.choices([*self._kinds], [weight for weight, _ in self._kinds.values()])[0]
            if self._numbers is None or number in self._numbers:
                self.met[number] = f"{loop.now:.2f} {name}"
                self._kinds[name][1]()
        loop.round_trip_s, loop.refusing = 0.0, False
        for wire in self._wires():
            wire.up_at = wire.down_at = loop.now
            wire.error_instead = b""
            if wire.silent:
                wire.cut()

    def _wires(self) -> list[Wire]:
        return [wire for wire in self._loop.wires if wire.is_open and wire.process in self._workers.alive]

    def _some(self) -> list[Wire]:
        wires = self._wires()
        return self._chance.sample(wires, max(1, round(len(wires) * self._chance.choice(_SHARES)))) if wires else []

    def _slow_server(self) -> None:
        self._loop.round_trip_s = self._chance.choice((0.5, 3.0))

        def fast() -> None:
            self._loop.round_trip_s = 0.0

        self._loop.call_later(self._chance.uniform(3.0, 12.0), fast)

    def _cut(self) -> None:
        for wire in self._some():
            wire.cut()

    def _lose_replies(self) -> None:
        for wire in self._some():
            wire.lose_replies()

    def _hold(self, *, up: bool) -> None:
        until = self._loop.now + self._chance.uniform(0.5, 8.0)
        for wire in self._some():
            if up:
                wire.up_at = max(wire.up_at, until)
            else:
                wire.down_at = max(wire.down_at, until)

    def _silence(self) -> None:
        for wire in self._some():
            wire.silent = True

    def _answer_with_errors(self, *, done: bool) -> None:
        for wire in self._some():
            wire.done, wire.error_instead = done, _DONE_ERROR if done else self._chance.choice(_ERRORS)

    def _refuse(self) -> None:
        self._loop.refusing = True

        def accept() -> None:
            self._loop.refusing = False

        self._loop.call_later(self._chance.uniform(0.1, 2.0), accept)

    def _restart_server(self) -> None:
        """It keeps its data, and loses its connections and scripts."""
        self._loop.control(command("SCRIPT", "FLUSH"))
        self._refuse()
        for wire in self._wires():
            wire.cut()

    def _look(self, until: float) -> None:
        self._written.append((self._loop.now, self._loop.server.written))
        if self._loop.now < until:
            self._loop.call_later(_LOOK_S, self._look, until)

    def _lose_writes(self) -> None:
        """As by a fail-over to a replica that lacks the last ones."""
        since = self._loop.now - self._chance.choice(_LOSSES_S)
        written = [size for at, size in self._written if at <= since] or [self._written[0][1]]
        self.lost_writes = True
        self._loop.restart_server(written[-1])
        self._written.clear()
        self._written.append((self._loop.now, written[-1]))

    def _reset_storm(self) -> None:
        def cut_all() -> None:
            for wire in self._wires():
                wire.cut()

        for n in range(8):
            self._loop.call_later(n * 0.2, cut_all)

    def _kill(self) -> None:
        if names := [*self._workers.alive]:
            self._loop.kill(self._chance.choice(names))

    def _stop(self) -> None:
        """As by SIGSTOP and SIGCONT, or a machine that swaps."""
        if names := [*self._workers.alive]:
            self._loop.stop_process(self._chance.choice(names), self._chance.choice((0.3, 2.0, 6.0, 15.0)))

    def _set_clock_wrong(self) -> None:
        if names := [*self._workers.alive]:
            self._loop.ahead_s[self._chance.choice(names)] = self._chance.choice((-3600.0, -2.0, 2.0, 3600.0))

    def _cut_answer(self) -> None:
        if answers := [*self._endpoints.answers]:
            self._chance.choice(answers).cut()
