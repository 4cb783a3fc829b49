"""Finds open runs whose work is in no queue: a queue was deleted, or a fail-over lost its last entries.

Workers delete an entry once its work is done, so the work of each open attempt and call has one. A run without events
for a while is looked for there, and costs nothing before that.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import structlog

from tokenbus.bus.keys import InternalTopic, Keys
from tokenbus.bus.leases import read_lag
from tokenbus.bus.liveness import Liveness
from tokenbus.bus.scripts.runs.timeouts import lose_attempt
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus.core.run.state import PendingCall, RunState
from tokenbus.core.run.waits import waits_only
from tokenbus.events.frames import ANY_FRAME, Control, Lost, RawFrame, encode

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

PAGE = 1000
NAMES_S = 10.0
"""How often all names of a queue are read while it has as many entries as there are runs that wait for it. Entries of
runs that ended may make up for those that were lost, and then the loss is found so much later.
"""
REASON = "the work was lost: it is in no queue"


class LostRuns(msgspec.Struct):
    """What a look found to be lost for good."""

    runs: list[RunState] = []
    """The last frame of their attempt was written, and will never be read."""
    calls: list[tuple[RunState, PendingCall]] = []


class LostWork:
    """Looks for the work of silent runs. What is missing at two looks in a row, without an event between them, is
    lost."""

    def __init__(self, server: Server, keys: Keys, *, liveness: Liveness) -> None:
        self._server = server
        self._keys = keys
        self._liveness = liveness
        self._missing: dict[tuple[int, InternalTopic], dict[str, int]] = {}
        """By queue: the runs that were missing at the last look, and how many events they had then."""
        self._names_at: dict[tuple[int, InternalTopic], float] = {}

    async def look(self, partition: int, silent: Sequence[RunState], states: Sequence[RunState]) -> LostRuns:
        """Look at one partition, given its silent runs and all of its open ones. Raises redis-py's errors.

        Closes the attempts whose work is lost; the parser then decides, as if their worker were lost.
        """
        found = LostRuns()
        for s in await self._missing_in(partition, "turns", "streaming", silent, states):
            if await self._close(partition, s) == b"closed" and await self._will_not_come(partition, s):
                found.runs.append(s)
        open_runs = {s.run for s in states}
        for s in await self._missing_in(partition, "tools", "tools", silent, states):
            found.calls += [(s, call) for call in s.calls if call.is_at_worker and call.child not in open_runs]
        return found

    async def _missing_in(
        self,
        partition: int,
        queue: InternalTopic,
        phase: str,
        silent: Sequence[RunState],
        states: Sequence[RunState],
    ) -> list[RunState]:
        place = partition, queue
        before = self._missing.pop(place, {})
        seen = [(s, s.events_applied) for s in silent if s.phase == phase]
        if not seen:
            return []
        stream, now = self._keys.topic(partition, queue), time.monotonic()
        waiting = sum(s.phase == phase and not waits_only(s) for s in states)
        due = before or now >= self._names_at.get(place, 0.0)
        if not due and await self._server.client.xlen(stream) >= waiting:
            return []
        self._names_at[place] = now + NAMES_S
        there = await self._names(stream)
        missing = [(s, taken) for s, taken in seen if s.run not in there and s.events_applied == taken]
        self._missing[place] = {s.run: taken for s, taken in missing}
        return [s for s, taken in missing if before.get(s.run) == taken]

    async def _names(self, stream: str) -> set[str]:
        begin, names = "-", set[str]()
        while page := await self._server.client.xrange(stream, begin, "+", count=PAGE):
            names.update(name.decode(errors="replace") for _, fields in page for name in fields)
            begin = f"({page[-1][0].decode()}"
        return names

    async def _close(self, partition: int, s: RunState) -> bytes:
        keys = self._keys.within(partition)
        call = lose_attempt(
            keys.run(s.run),
            keys.topic(partition, "raw"),
            keys.topic(partition, "control"),
            keys.lease(partition, "normalizer"),
            run=s.run,
            attempt=s.attempt,
            frame=encode(RawFrame(s.turn, s.attempt, ANY_FRAME, self._server.clock.now_ms(), [Lost(REASON)])),
            control_frame=encode(Control(s.run, "closed", s.attempt)),
        )
        verdict: bytes = await run_script(self._server, call)
        if verdict == b"lost":
            log.warning("attempt_lost", run=s.run, turn=s.turn, attempt=s.attempt, reason=REASON)
        return verdict

    async def _will_not_come(self, partition: int, s: RunState) -> bool:
        """Whether no stage has input left that could be the end of the run's attempt."""
        if s.gate and not s.gate.idle and not s.gate.bypassed:
            return False  # the run waits for its policies, which have their own timeout
        taken = s.events_applied
        for group in ("normalizer", "parser"):
            if await read_lag(self._server.client, self._keys.lease(partition, group)):
                return False
        return s.events_applied == taken
