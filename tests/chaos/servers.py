"""The server of a round: a single one that loses nothing, or a Sentinel group whose fail-overs may lose last writes.

Each has the url for the workers, a client for the harness, the proxy between server and workers where there is one, and
its own way to be disturbed.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Literal

from redis.asyncio import Redis, Sentinel

from tests.chaos.proxy import Proxy
from tests.servers import MASTER, SentinelGroup, binary, sentinel_group
from tests.waiting import eventually
from tokenbus_services.embedded import EmbeddedServer

Kind = Literal["single", "sentinel"]
Pause = Callable[[float, float], Awaitable[None]]
"""Waits for a while between the two; less, once the faults are over."""
_PROMOTED_S = 40.0


class Single:
    """One server behind a proxy. Its file has each write before the reply is sent (``appendfsync always``): so kill -9
    loses nothing that anybody was told is written, and what the judge demands is exact. ``everysec`` may put a write
    off.
    """

    lossy = False
    """Writes that were acknowledged may be lost."""

    def __init__(self, server: EmbeddedServer, proxy: Proxy, client: Any) -> None:
        self._server = server
        self.proxy: Proxy | None = proxy
        self.client = client
        self.url = f"redis://127.0.0.1:{proxy.port}"

    async def disturb(self, chance: random.Random, pause: Pause) -> AsyncGenerator[str]:
        """kill -9 and a start on the same data; or SIGSTOP, now and then for longer than anybody waits for a reply.

        Yields the fault's name as it begins."""
        pid = self._server.pid
        if chance.random() < 0.6:
            yield "kill -9 and restart of the server"
            os.kill(pid, signal.SIGKILL)
            await asyncio.to_thread(self._server.stop)
            await pause(0.0, 1.5)
            await asyncio.to_thread(self._server.start)
        else:
            yield "SIGSTOP of the server"
            os.kill(pid, signal.SIGSTOP)
            await pause(0.3, 6.0 if chance.random() < 0.2 else 2.0)
            os.kill(pid, signal.SIGCONT)


class Group:
    """A master and its replica under Sentinel, which replicate asynchronously: a fail-over may lose the last writes."""

    lossy = True
    proxy: Proxy | None = None

    def __init__(self, group: SentinelGroup, sentinel: Sentinel) -> None:
        self.url = group.url
        self.client: Any = sentinel.master_for(MASTER, redis_class=Redis)
        self._servers = {server.port: server for server in (group.master, group.replica)}
        self._sentinel: Any = sentinel.sentinels[0]

    async def disturb(self, chance: random.Random, pause: Pause) -> AsyncGenerator[str]:
        """kill -9 of the master, or SIGSTOP until another is promoted; then it comes back as the replica."""
        old = await self._master()
        server = self._servers[old]
        killed = chance.random() < 0.6
        yield f"fail-over: {'kill -9' if killed else 'SIGSTOP'} of the master"
        os.kill(server.pid, signal.SIGKILL if killed else signal.SIGSTOP)

        async def promoted() -> bool:
            return await self._master() != old

        await eventually(promoted, timeout=_PROMOTED_S)
        if killed:
            await asyncio.to_thread(server.stop)
            await asyncio.to_thread(server.start)
        else:
            await pause(0.0, 2.0)
            os.kill(server.pid, signal.SIGCONT)
        await self._in_step(old)

    async def _master(self) -> int:
        _, port = await self._sentinel.sentinel_get_master_addr_by_name(MASTER)
        return int(port)

    async def _in_step(self, port: int) -> None:
        """Until this server follows the master, and Sentinel knows it well enough to promote it next."""

        async with Redis(port=port) as client:
            # As Sentinel does it when it comes to it: who is still connected must not take stale data for the truth.
            together: Any = client.pipeline()
            together.replicaof("127.0.0.1", await self._master())
            together.client_kill_filter(_type="normal")
            await together.execute()

        async def follows() -> bool:
            async with Redis(port=port) as client:
                replication: Any = await client.info("replication")
                return replication.get("master_link_status") == "up"

        async def known() -> bool:
            replicas: Any = await self._sentinel.sentinel_slaves(MASTER)
            return any(r["flags"] == "slave" and r["master-link-status"] == "ok" for r in replicas)

        await eventually(follows, timeout=_PROMOTED_S)
        await eventually(known, timeout=_PROMOTED_S)


Deployed = Single | Group


@asynccontextmanager
async def single(directory: Path) -> AsyncGenerator[Deployed]:
    """One server."""
    options = {"appendfsync": "always", "loglevel": "warning"}
    server = EmbeddedServer(directory / "server", binary=binary(), appendonly=True, options=options)
    async with AsyncExitStack() as stack:
        await asyncio.to_thread(server.start)
        stack.push_async_callback(asyncio.to_thread, server.stop)
        proxy = await stack.enter_async_context(Proxy(server.port))
        client = await stack.enter_async_context(Redis(port=server.port))
        yield Single(server, proxy, client)


@asynccontextmanager
async def group(directory: Path) -> AsyncGenerator[Deployed]:
    """A Sentinel group."""
    servers = sentinel_group(directory)
    running = await asyncio.to_thread(servers.__enter__)
    try:
        port = int(running.url.rpartition("/")[0].rpartition(":")[2])
        sentinel = Sentinel([("127.0.0.1", port)], sentinel_kwargs={"decode_responses": True})
        deployed = Group(running, sentinel)
        try:
            yield deployed
        finally:
            await deployed.client.aclose()
            await sentinel.aclose()
    finally:
        await asyncio.to_thread(servers.__exit__, None, None, None)


KINDS: dict[Kind, Any] = {"single": single, "sentinel": group}
"""How a deployment's server is made."""
