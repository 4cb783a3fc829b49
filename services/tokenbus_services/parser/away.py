"""Puts runs away that have only waited for some seconds, and back when their first deadline comes.

Everything else that happens to such a run puts it back by itself: see bus/scripts/runs/away.py. So a worker that is
killed or loses the partition at any step leaves the run either here or there.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import structlog
from redis.exceptions import ResponseError

from tokenbus.bus.keys import Keys
from tokenbus.bus.liveness import holding
from tokenbus.bus.scripts.runs.away import AwayRun, put_away, put_back
from tokenbus.bus.scripts.script import ScriptCall
from tokenbus.bus.server.error_replies import is_final
from tokenbus.bus.server.run_scripts import run_script, run_scripts
from tokenbus.bus.server.server import Server
from tokenbus.bus.stage.stage import Stage
from tokenbus.events.frames import CONTROL_ATTEMPT, EventFrame, PutAway, encode
from tokenbus_services.parser.logic import ParserLogic

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

AWAY_AFTER_MS = 5_000
"""A run is put away once it has only waited for so long."""
LOOK_S = 1.0
"""How often to look."""
MOST_BYTES = 2**18
"""About so much one script puts away: it takes 2 ms."""
MOST_TURN_BYTES = 2**19
"""A run whose turn had more bytes of events stays in memory."""
PAGE = 200
"""Runs that are put back at once in a partition, and as many that are put away."""


class AwayRuns:
    """Call `look` in the loop of the parser's clock."""

    def __init__(
        self, server: Server, keys: Keys, stage: Stage, logics: Mapping[int, ParserLogic], *, open_ms: int
    ) -> None:
        """``logics``: by partition, the most recent logic. ``open_ms``: the lifetime of an open run."""
        self._server = server
        self._keys = keys
        self._stage = stage
        self._logics = logics
        self._open_ms = open_ms
        self._next_look = 0.0

    async def look(self) -> None:
        """Put back what is due, then put away what only waits. Raises redis-py's errors if the server is
        unavailable."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_S
        owned = self._stage.owned
        try:
            await self._put_back(owned)
            for partition in owned:
                await self._put_away(partition)
        except ResponseError as e:  # a key of a wrong type, a server that is full: runs that wait stay as they are
            if not is_final(e):
                raise
            log.warning("runs_not_put_away", problem=str(e))

    async def _put_back(self, owned: list[int]) -> None:
        now_ms, pipe = self._server.clock.now_ms(), self._server.client.pipeline(transaction=False)
        for partition in owned:
            pipe.zrangebyscore(self._keys.away(partition), "-inf", now_ms, start=0, num=PAGE)
        calls: list[ScriptCall] = []
        for partition, due in zip(owned, await pipe.execute(), strict=True):
            returned = self._logics[partition].returned
            runs = {run.decode(errors="replace") for run in due} | returned  # those leave the index
            returned.clear()
            keys = self._keys.within(partition)
            places = keys.topic(partition, "events"), keys.lease(partition, "parser"), keys.away(partition)
            calls += [put_back(keys.run(run), *places, run=run) for run in sorted(runs)]
        if calls:
            await run_scripts(self._server, calls)

    async def _put_away(self, partition: int) -> None:
        """Put away some of a partition's runs. Looks only at those that have waited for long enough."""
        now_ms = self._server.clock.now_ms()
        until_ms = now_ms - AWAY_AFTER_MS
        if self._logics[partition].next_resting(until_ms) is None:
            return
        async with holding(self._stage.lock_of(partition)):  # so that the states are of the committed offset
            part, logic = self._stage.ready_part(partition), self._logics[partition]
            if part is None or part.logic is not logic:
                return
            runs, keys, size = list[AwayRun](), 0, 0
            while keys < PAGE and size < MOST_BYTES and (s := logic.next_resting(until_ms)):
                logic.rests_since(s, now_ms + 1)  # if it stays, a later look finds it
                if s.turn_bytes <= MOST_TURN_BYTES and (s.gate is None or s.gate.idle):
                    runs.append(logic.put_away(s.run, now_ms))
                    keys, size = keys + 1 + len(runs[-1].children), size + len(runs[-1].back)
            if not runs:
                return
            call = put_away(
                part.lease_key,
                part.stream,
                part.keys.away(partition),
                runs,
                token=part.token,
                offset=part.offset,
                forget=encode(EventFrame(0, CONTROL_ATTEMPT, now_ms, [PutAway()])),
                ttl_ms=self._open_ms + max(0, *(each.due_ms - now_ms for each in runs)),
            )
            await run_script(self._server, call)
