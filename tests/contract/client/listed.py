"""Runs on the index, written by the scripts that intake and the parser use."""

from __future__ import annotations

from tests.commits import commit_call
from tests.run_calls import accept_call
from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts import Arg, Commit
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server

TTL_MS = 60_000


class Listed:
    """Accepts runs and ends them."""

    def __init__(self, server: Server, keys: Keys) -> None:
        self.server = server
        self.keys = keys
        self.client = server.client
        self._tenants: dict[str, str] = {}

    async def accept(self, run: str, at_ms: int, *fields: Arg) -> bytes:
        """What intake writes; the summary's fields come after the time."""
        self._tenants[run] = str(fields[fields.index("tenant") + 1]) if "tenant" in fields else ""
        call = accept_call(self.keys, run, at_ms=at_ms, of_tenant=self._of_tenant(run) or (), fields=fields)
        return await run_script(self.server, call)

    async def end(self, run: str, status: str = "completed", *fields: Arg, keep_ms: int = TTL_MS) -> int:
        """What the parser commits; returns the time that it noted."""
        keys, partition = self.keys, self.keys.partition_of(run)
        await self.client.hset(keys.lease(partition, "parser"), mapping={"token": 1, "offset": "0-0"})
        await self.commit_end(run, status, *fields, keep_ms=keep_ms)
        return int(await self.client.hget(keys.run(run), "ended"))

    async def commit_end(self, run: str, status: str = "completed", *fields: Arg, keep_ms: int = TTL_MS) -> None:
        """The commit alone, by the owner of the lease."""
        keys, partition = self.keys, self.keys.partition_of(run)
        lease, events = keys.lease(partition, "parser"), keys.topic(partition, "events")
        commit = Commit(lease, events)
        commit.put(keys.run(run), "status", status, *fields)
        places = (keys.open_runs(partition), keys.ended_runs(partition), keys.waiting(partition))
        of_tenant = self._of_tenant(run)
        tenants = (*of_tenant, keys.waiting(partition, self._tenants[run])) if of_tenant else None
        commit.end_run(keys.run(run), *places, of_tenant=tenants, run=run, keep_ms=keep_ms)
        commit.expire(keys.run(run), keep_ms)
        call = commit_call(commit, entries=0, size=0)
        assert (await run_script(self.server, call))[0] == b"ok"

    def _of_tenant(self, run: str) -> tuple[str, str] | None:
        partition, tenant = self.keys.partition_of(run), self._tenants.get(run, "")
        return (self.keys.open_runs(partition, tenant), self.keys.ended_runs(partition, tenant)) if tenant else None
