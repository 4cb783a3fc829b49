"""Publishes the ends of durable runs: each once what it follows from is where the deployment's `durability` says.

The parser has read all of that from this server, so a later write that is replicated says that it is, too. If the
server was another one by then, which lacks some of it, the parser's next commit finds that, and reads it anew. An end
that waits delays no run that is not durable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping

import structlog
from redis.exceptions import RedisError

from tokenbus.bus import scripts
from tokenbus.bus.keys import Keys
from tokenbus.bus.leases import wait_until_replicated
from tokenbus.bus.liveness import Liveness, stop_task, together, wait_briefly
from tokenbus.bus.run_record import ENDED, SEQ, STATUS, status_of
from tokenbus.bus.scripts.runs.timeouts import RunIs, append_timeout
from tokenbus.bus.server.durability import NotReplicated
from tokenbus.bus.server.retry import LOG_EVERY_S, Defects
from tokenbus.bus.server.run_scripts import run_scripts
from tokenbus.bus.server.server import Server
from tokenbus.core.run.state import RunState
from tokenbus.events.frames import CONTROL_ATTEMPT, HAS_ENDED, BusEvent, DeadlinePassed, EventFrame, Stored, encode
from tokenbus_services.parser.logic import ParserLogic

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

LOOK_S = 0.5
"""How often to look for ends that wait still."""
FIRST_LOOK_S = 0.005
"""How soon to look again after one begins to wait, whose commit may be on its way; then in growing steps."""


class DurableEnds:
    """Call `open`, then `close`."""

    def __init__(
        self,
        server: Server,
        keys: Keys,
        logics: Mapping[int, ParserLogic],
        *,
        owned: Callable[[], Collection[int]],
    ) -> None:
        """``logics``: by partition, the most recent logic; ``owned``: the partitions that this worker has."""
        self._server, self._keys, self._logics, self._owned = server, keys, logics, owned
        self._waits = asyncio.Event()
        self._told_at: dict[str, float] = {}
        """When the parser was told of a run whose end it has not published yet."""
        self._say_at = 0.0
        self._task: asyncio.Task[None] | None = None

    async def open(self, liveness: Liveness) -> None:
        """Start publishing."""
        self._task = liveness.start(self._run(), name="durable ends")

    async def close(self) -> None:
        await stop_task(self._task)

    def look(self) -> None:
        """Look soon: an end waits."""
        self._waits.set()

    async def _run(self) -> None:
        defects, pause_s = Defects(), LOOK_S
        while True:
            begun = await wait_briefly(self._waits, timeout_s=pause_s)
            pause_s = FIRST_LOOK_S if begun else min(2 * pause_s, LOOK_S)
            self._waits.clear()
            waiting = {p: states for p in self._owned() if (states := self._logics[p].sealed())}
            known = {state.run for states in waiting.values() for state in states}
            self._told_at = {run: at for run, at in self._told_at.items() if run in known}
            for reply in await together([self._publish(*each) for each in waiting.items()]):
                if isinstance(reply, Exception):
                    self._say(reply, len(known))
                    defects.count(reply)
                elif isinstance(reply, BaseException):
                    raise reply
                else:
                    defects.none()

    async def _publish(self, partition: int, states: Collection[RunState]) -> None:
        now = asyncio.get_running_loop().time()
        states = [s for s in states if now >= self._told_at.get(s.run, 0.0) + LOOK_S]
        if not states:
            return
        there, dropped = await self._look_up(partition, states)
        forget = DeadlinePassed("silent", HAS_ENDED)
        calls = [self._append(partition, s, forget, "abandoned") for s in dropped]
        if there:
            await wait_until_replicated(self._server, self._keys, partition)
            calls += [self._append(partition, s, Stored(s.events_applied), "not ended") for s in there]
        if calls:
            await run_scripts(self._server, calls)
        self._told_at |= {s.run: now for s in (*there, *dropped)}

    async def _look_up(self, partition: int, states: Collection[RunState]) -> tuple[list[RunState], list[RunState]]:
        """Those of which the server has all events before the end, for one that lost events ends by its worker's memory
        alone; and those whose state is older than their log, which has the end, or whose keys are gone.
        """
        keys = self._keys.within(partition)
        wanted = [(s, s.seq) for s in states]
        pipe = self._server.client.pipeline(transaction=False)
        for s in states:
            pipe.hmget(keys.run(s.run), [STATUS, SEQ])
        there, dropped = list[RunState](), list[RunState]()
        for (s, before), (status, seq) in zip(wanted, await pipe.execute(), strict=True):
            if status is None or status_of(status) in ENDED:
                dropped.append(s)
            elif int(seq or 0) == before:
                there.append(s)
        return there, dropped

    def _append(self, partition: int, s: RunState, event: BusEvent, only_if: RunIs) -> scripts.ScriptCall:
        keys = self._keys.within(partition)
        return append_timeout(
            keys.run(s.run),
            keys.topic(partition, "events"),
            keys.lease(partition, "parser"),
            run=s.run,
            frame=encode(EventFrame(0, CONTROL_ATTEMPT, self._server.clock.now_ms(), [event])),
            only_if=only_if,
        )

    def _say(self, error: Exception, waiting: int) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._say_at:
            self._say_at = now + LOG_EVERY_S
            what = "ends_not_replicated" if isinstance(error, NotReplicated) else "ends_not_published"
            told = str(error) if isinstance(error, RedisError | OSError) else repr(error)
            log.warning(what, runs=waiting, problem=told)
