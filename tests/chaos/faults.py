"""Injects faults at random, one after the other and several at once, and repairs all at the end."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
from redis.exceptions import RedisError

from tests.chaos import ledger
from tests.chaos.deployment.proxy import Proxy, Way
from tests.chaos.deployment.servers import Deployed, Single
from tests.chaos.deployment.workers import Worker, Workers
from tests.e2e.fleet import Kind
from tests.waiting import eventually

AT_LEAST, AT_MOST = 2, 4
"""Number of workers of each kind."""
START_S = 30.0
"""How long the workers that were started last may take until they are ready."""


Fault = Literal[
    "kill",
    "kill a stage",
    "freeze",
    "scale",
    "break connections",
    "hold connections",
    "refuse connections",
    "reset storm",
    "error replies",
    "task",
    "memory limit",
    "stutter",
    "server",
    "hold the lock",
    "lost keys",
    "stop a kind",
    "slow server",
    "full server",
    "huge entry",
]


ALL: dict[Fault, int] = {
    "kill": 56,
    "kill a stage": 4,
    "freeze": 8,
    "scale": 7,
    "break connections": 12,
    "hold connections": 6,
    "refuse connections": 4,
    "reset storm": 4,
    "error replies": 6,
    "task": 8,
    "memory limit": 3,
    "stutter": 3,
    "server": 10,
    "hold the lock": 4,
    "lost keys": 3,
    "stop a kind": 2,
    "slow server": 1,
    "full server": 3,
    "huge entry": 1,
}
THEMES: tuple[dict[Fault, int], ...] = (
    {"freeze": 4, "stop a kind": 2, "slow server": 1, "full server": 2, "hold the lock": 2},
    {"huge entry": 1, "hold the lock": 1},
)
"""Faults that give no worker a reason to exit; and of these, those that delay no run but their own. The judge allows
nothing else in a round that has only such faults.
"""
MIB = 2**20
HUGE_BYTES = (60 * MIB, 120 * MIB)
"""Sizes of a huge entry: one that a worker reads, and one that it does not. To copy a larger one, each time that it is
looked at, takes a server seconds.
"""
_HUGE_WEIGHTS = (2, 1)
ROUND_TRIP_S = 3.0
MOST_FILLED = 4
"""How often a round's server is full: each time what must be forgotten is older than the round."""
_ERRORS = (
    "ERR upstream failure",
    "ERR max number of clients reached",
    "LOADING Redis is loading the dataset in memory",
    "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
    "READONLY You can't write against a read only replica.",
    "MISCONF Errors writing to the AOF file: No space left on device",
    "OOM command not allowed when used memory > 'maxmemory'.",
    "NOSCRIPT No matching script. Please use EVAL.",
)
"""Error replies of proxies and of servers in trouble."""


class Rates(msgspec.Struct, frozen=True):
    """How frequent and how long faults are."""

    pause_s: float = 0.55
    """Mean time between two faults."""
    freeze_s: tuple[float, float] = (1.0, 5.0)
    """How long a worker is stopped: both shorter and longer than its lease."""
    freeze_kind_s: tuple[float, float] = (3.0, 12.0)
    """How long all workers of a kind are stopped."""
    slow_s: tuple[float, float] = (8.0, 16.0)
    """How long the server is slow."""
    weights: Mapping[Fault, int] = msgspec.field(default_factory=lambda: ALL)
    """Relative frequency of each fault; a fault that is not listed never occurs."""


class Chaos:
    def __init__(
        self,
        chance: random.Random,
        rates: Rates,
        workers: Workers,
        server: Deployed,
        to_provider: Proxy,
        tokens: Path,
        ask_huge: Callable[[Single, int], Awaitable[bool]],
        *,
        ballast: bool = False,
    ) -> None:
        """``tokens``: each file in this directory lets a tool call keep its interpreter's lock. ``ask_huge``: request a
        run with an entry of this size. ``ballast``: the server has something to forget when it is full.
        """
        self._ask_huge = ask_huge
        self._ballast = ballast
        self._chance = chance
        self._rates = rates
        self._workers = workers
        self._server = server
        self._to_provider = to_provider
        self._tokens = tokens
        self._disturbing = asyncio.Lock()
        self._healing: list[asyncio.Task[None]] = []
        self._over = asyncio.Event()
        self.tally: Counter[str] = Counter()
        self.without_room: list[str] = []
        self._kinds: list[Kind] = []
        self._faults: dict[Fault, Callable[[], Awaitable[None]]] = {
            "kill": self._kill,
            "kill a stage": self._kill_a_stage,
            "freeze": self._freeze,
            "scale": self._scale,
            "break connections": self._break_connections,
            "hold connections": self._hold_connections,
            "refuse connections": self._refuse_connections,
            "reset storm": self._reset_storm,
            "error replies": self._error_replies,
            "task": self._hurt_task,
            "memory limit": self._limit_memory,
            "stutter": self._stutter,
            "server": self._disturb_server,
            "hold the lock": self._hold_lock,
            "lost keys": self._lose_keys,
            "stop a kind": self._stop_a_kind,
            "slow server": self._slow_server,
            "full server": self._fill_server,
            "huge entry": self._send_huge_entry,
        }

    async def run(self, seconds: float) -> None:
        """Inject faults for this time, then repair all."""
        clock = asyncio.get_running_loop().time
        until = clock() + seconds
        while clock() < until:
            await asyncio.sleep(min(self._chance.expovariate(1 / self._rates.pause_s), 3.0))
            await self._replace()
            if weights := self._rates.weights:  # else those alone that last for the whole round
                [fault] = self._chance.choices(list(weights), list(weights.values()))
                await self._faults[fault]()
        await self.heal()

    async def heal(self) -> None:
        """Repair everything, and restore the number of workers, which takes long on a machine with other work."""
        self._over.set()
        await asyncio.gather(*self._healing)
        await self._replace()
        with suppress(AssertionError):  # then the judge reports the runs that wait for it
            await eventually(lambda: all(worker.ready for worker in self._workers.well()), timeout=START_S)

    def _later(self, healing: Coroutine[Any, Any, None]) -> None:
        self._healing.append(asyncio.create_task(healing))

    async def _pause(self, low: float, high: float) -> None:
        """Wait for a random time, or until the round's faults are over."""
        try:
            async with asyncio.timeout(self._chance.uniform(low, high)):
                await self._over.wait()
        except TimeoutError:
            pass

    # --- processes --------------------------------------------------------------------------------------------

    async def _replace(self) -> None:
        """Act as a supervisor: keep this many workers of each kind running."""
        for kind in self._workers.kinds:
            for _ in range(AT_LEAST - len(self._workers.well(kind))):
                self._workers.start(kind)

    async def _kill(self) -> None:
        if workers := self._workers.well():
            self._kill_one(self._chance.choice(workers))

    async def _kill_a_stage(self) -> None:
        for worker in self._workers.well(self._chance.choice(self._workers.kinds)):
            self._kill_one(worker)

    def _kill_one(self, worker: Worker) -> None:
        worker.kill()
        self.tally[f"kill -9 of a {worker.kind}"] += 1

    async def _freeze(self) -> None:
        if not (workers := self._workers.well()):
            return
        worker = self._chance.choice(workers)
        worker.freeze()
        self.tally[f"SIGSTOP of a {worker.kind}"] += 1

        async def thaw() -> None:
            await self._pause(*self._rates.freeze_s)
            worker.thaw()

        self._later(thaw())

    async def _stop_a_kind(self) -> None:
        """Stop all workers of a kind at once; each kind in its turn."""
        if not self._kinds:
            self._kinds = self._chance.sample(self._workers.kinds, len(self._workers.kinds))
        workers = self._workers.well(kind := self._kinds.pop())
        for worker in workers:
            worker.freeze()
        self.tally[f"SIGSTOP of every {kind}"] += 1

        async def thaw() -> None:
            await self._pause(*self._rates.freeze_kind_s)
            for worker in workers:
                worker.thaw()

        self._later(thaw())

    async def _scale(self) -> None:
        kind: Kind = self._chance.choice(self._workers.kinds)
        workers = self._workers.well(kind)
        if len(workers) < AT_MOST and (len(workers) <= AT_LEAST or self._chance.random() < 0.5):
            self._workers.start(kind)
            self.tally[f"{kind} added"] += 1
        else:
            self._later(self._chance.choice(workers).stop())
            self.tally[f"{kind} removed"] += 1

    # --- connections ------------------------------------------------------------------------------------------

    def _side(self) -> tuple[str, Proxy]:
        if self._server.proxy is None or self._chance.random() < 0.25:
            return "provider", self._to_provider
        return "server", self._server.proxy

    async def _break_connections(self) -> None:
        name, proxy = self._side()
        how = self._chance.choice(("reset", "cut in a request", "cut in a reply", "reply lost"))
        for link in proxy.some(self._chance, self._chance.choice((0.0, 0.2, 1.0))):
            match how:
                case "reset":
                    link.reset()
                case "cut in a request":
                    link.cut("up", self._chance.random())
                case "cut in a reply":
                    link.cut("down", self._chance.random())
                case _:
                    link.cut("down", 0.0)
            self.tally[f"connection to the {name}: {how}"] += 1

    async def _hold_connections(self) -> None:
        name, proxy = self._side()
        links = proxy.some(self._chance, self._chance.choice((0.1, 0.4)))
        silent = self._chance.random() < 0.3
        ways: list[Way] = [way for way in get_args(Way) if self._chance.random() < 0.7]
        for link in links:
            link.silent |= silent  # never released: a connection that continues after a gap is not a fault of any
            # network
            for way in ways:
                link.hold(way)
            self.tally[f"connection to the {name}: {'half open' if silent else 'delayed'}"] += 1

        async def let() -> None:
            await self._pause(0.2, 7.0 if silent else 3.0)
            for link in links:
                if link.silent:
                    link.reset()
                for way in ways:
                    link.release(way)

        self._later(let())

    async def _refuse_connections(self) -> None:
        name, proxy = self._side()
        proxy.refusing = True
        proxy.reset_all()
        self.tally[f"{name} refuses all connections"] += 1

        async def accept() -> None:
            await self._pause(0.2, 2.0)
            proxy.refusing = False

        self._later(accept())

    async def _reset_storm(self) -> None:
        """Reset connections in quick succession while clients are reconnecting."""
        name, proxy = self._side()
        self.tally[f"{name}: seconds of resets"] += 1

        async def storm() -> None:
            clock = asyncio.get_running_loop().time
            until = clock() + self._chance.uniform(0.5, 3.0)
            while clock() < until and not self._over.is_set():
                for link in proxy.some(self._chance, 0.0):
                    link.reset()
                await asyncio.sleep(self._chance.uniform(0.0, 0.05))

        self._later(storm())

    async def _error_replies(self) -> None:
        if self._server.proxy is None:
            return
        for link in self._server.proxy.some(self._chance, self._chance.choice((0.0, 0.1, 0.5))):
            error = self._chance.choice(_ERRORS)
            # Only errors that stand for a broken connection may have been executed; the others say that they were not.
            link.refuse(error, done=error.endswith("upstream failure") and self._chance.random() < 0.5)
            self.tally[f"error reply: {error.partition(' ')[0]}"] += 1

    # --- inside a worker --------------------------------------------------------------------------------------

    async def _hurt_task(self) -> None:
        """End or freeze one of a worker's long-lived tasks: the worker has to notice it and exit."""
        if workers := [w for w in self._workers.well() if w.ready]:
            worker = self._chance.choice(workers)
            how = self._chance.choice(("ends", "freezes"))
            worker.fault_task(how)
            self.tally[f"a task of a {worker.kind} {how}"] += 1

    async def _hold_lock(self) -> None:
        """Let some tool calls keep the interpreter's lock of their process for ever."""
        held = {self._tokens / str(self.tally["tool calls that may hold the lock"] + n) for n in range(3)}
        self._tokens.mkdir(exist_ok=True)
        for token in held:
            token.touch()
        self.tally["tool calls that may hold the lock"] += len(held)

        async def let() -> None:
            await self._pause(5.0, 20.0)
            taken = [token for token in held if not token.exists()]
            for token in held:
                token.unlink(missing_ok=True)
            if taken:  # the fault lasts until the timeout of such a call
                await asyncio.sleep(ledger.TIMEOUT_S)

        self._later(let())

    # --- the server's data ----------------------------------------------------------------------------------------

    async def _lose_keys(self) -> None:
        """Delete the queue of turns of a partition, with what waits there and what fetchers have in hand."""
        with suppress(RedisError, OSError):
            queues = [key async for key in self._server.client.scan_iter(match="*}:turns", count=1000)]
            if queues and await self._server.client.delete(self._chance.choice(sorted(queues))):
                self.tally["a queue of turns deleted"] += 1

    # --- the server -------------------------------------------------------------------------------------------

    async def _limit_memory(self) -> None:
        """Limit the server's memory to its current size for a while, so that it accepts no more data."""
        if not isinstance(server := self._server, Single) or self._ballast:
            return
        self.tally["the server at its memory limit"] += 1

        async def limit() -> None:
            async with self._disturbing:
                await server.limit_memory(self._pause)

        if not self._disturbing.locked():
            self._later(limit())

    async def _stutter(self) -> None:
        """The server stalls for a moment again and again, as with a slow or failing disk."""
        if not isinstance(server := self._server, Single):
            return
        self.tally["the server stutters, as on a slow disk"] += 1

        async def stutter() -> None:
            async with self._disturbing:
                await server.stutter(self._chance, self._over)

        if not self._disturbing.locked():
            self._later(stutter())

    async def _fill_server(self) -> None:
        """The server is full, until the deployment has made room by itself."""
        if not isinstance(server := self._server, Single) or not self._ballast or self._disturbing.locked():
            return
        if self.tally["the server is full"] >= MOST_FILLED:
            return
        self.tally["the server is full"] += 1

        async def fill() -> None:
            async with self._disturbing:
                if problem := await server.fill(self._over):
                    self.without_room.append(problem)

        self._later(fill())

    async def _slow_server(self) -> None:
        """Each command takes seconds, which is less than the time limit of a command."""
        if self._server.proxy is None or self._disturbing.locked():
            return
        proxy = self._server.proxy
        self.tally["each round trip to the server takes seconds"] += 1

        async def slow() -> None:
            async with self._disturbing:
                proxy.round_trip_s = ROUND_TRIP_S
                await self._pause(*self._rates.slow_s)
                proxy.round_trip_s = 0.0

        self._later(slow())

    async def _send_huge_entry(self) -> None:
        """Somebody sends a request of a size that no worker should hold."""
        if type(server := self._server) is not Single or self._disturbing.locked():
            return
        [size] = self._chance.choices(HUGE_BYTES, _HUGE_WEIGHTS)
        if await self._ask_huge(server, size):
            self.tally[f"a request of {size // MIB} MiB"] += 1

    async def _disturb_server(self) -> None:
        """Inject one such fault at a time: no deployment survives two overlapping fail-overs."""

        async def disturb() -> None:
            async with self._disturbing:
                async for fault in self._server.disturb(self._chance, self._pause):
                    self.tally[fault] += 1

        if not self._disturbing.locked():
            self._later(disturb())
