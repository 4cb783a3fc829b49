"""Keeps the index of runs complete: adds open runs that are missing, and removes runs that are no longer open.

Intake and the parser list runs as they accept and end them. This finds what they could not: an index that was lost or
could not be written, runs whose hash expired, runs that are open for longer than their tenant's index lives.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

import structlog
from redis.exceptions import ResponseError

from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts.runs.index import OpenRun, list_open, unlist_ended
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus.core.request.bounds import tenant_of
from tokenbus.core.run.state import RunState

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

PAGE = 500
"""Runs looked at in one partition at once, of either kind."""


class IndexKeeper:
    """Looks at the index of the partitions that this worker owns, a page at a time."""

    def __init__(self, server: Server, keys: Keys, *, keep_ms: int, open_ms: int) -> None:
        """``keep_ms``: how long ended runs are kept. ``open_ms``: the lifetime of an open run."""
        self._server = server
        self._keys = keys
        self._keep_ms = keep_ms
        self._open_ms = open_ms
        self._listed: dict[int, set[str]] = {}
        """By partition: open runs that are known to be listed."""
        self._list_again = 0.0
        """When to list all open runs once more, so that a tenant's index outlives a run that is open for long."""
        self._at: dict[int, int] = {}
        """By partition: how much of the index this pass has looked at."""

    async def look(self, runs: Mapping[int, Sequence[RunState]]) -> None:
        """Look at each of these partitions, given its open runs. Raises redis-py's errors if the server is
        unavailable."""
        self._listed = {p: listed for p, listed in self._listed.items() if p in runs}
        if time.monotonic() >= self._list_again:
            self._listed, self._list_again = {}, time.monotonic() + self._open_ms / 2000
        for partition, states in runs.items():
            try:
                await self._list(partition, states)
                await self._unlist(partition, {s.run for s in states})
            except ResponseError as e:  # a key of a wrong type, say; runs continue without an index
                log.warning("run_index_not_repaired", partition=partition, problem=str(e))

    async def _list(self, partition: int, states: Sequence[RunState]) -> None:
        listed = self._listed.get(partition, set()) & {s.run for s in states}
        missing = [self._open_run(partition, s) for s in states if s.run not in listed][:PAGE]
        if missing:
            call = list_open(self._keys.open_runs(partition), missing, ttl_ms=self._open_ms)
            reply: list[bytes] = await run_script(self._server, call)
            listed.update(run.decode() for run in reply)
        self._listed[partition] = listed

    async def _unlist(self, partition: int, open_runs: Collection[str]) -> None:
        """Look at one page, and remove the runs that are no longer open."""
        keys, at = self._keys.within(partition), self._at.get(partition, 0)
        page: list[bytes] = await self._server.client.zrange(keys.open_runs(partition), at, at + PAGE - 1)
        doubtful = [run for run in (member.decode() for member in page) if run not in open_runs]
        gone = 0
        if doubtful:
            names = [keys.run(run) for run in doubtful]
            places = keys.open_runs(partition), keys.ended_runs(partition), keys.away(partition)
            call = unlist_ended(*places, names, keep_ms=self._keep_ms, runs=doubtful)
            gone = await run_script(self._server, call)
        self._at[partition] = at + PAGE - gone if len(page) == PAGE else 0

    def _open_run(self, partition: int, s: RunState) -> OpenRun:
        tenant = tenant_of(s.accepted.metadata)
        return OpenRun(
            key=self._keys.within(partition).run(s.run),
            run=s.run,
            accepted_ms=s.accepted_ms,
            provider=s.target.provider,
            model=s.target.model,
            tenant=tenant,
            of_tenant=self._keys.open_runs(partition, tenant),
        )
