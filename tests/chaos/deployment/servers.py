"""The server of a round: a single server that loses nothing, or a Sentinel group or a Cluster, whose fail-overs may
lose the last writes.

Each has the url for the workers, a client for the harness, the proxy between server and workers if there is one, and
its own faults.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from redis.asyncio import Redis, RedisCluster, Sentinel
from redis.asyncio.cluster import ClusterNode
from redis.exceptions import RedisError

from tests.chaos.deployment.proxy import Proxy
from tests.servers import MASTER, ClusterGroup, SentinelGroup, binary, cluster_group, sentinel_group
from tests.waiting import eventually
from tokenbus_services.process.embedded_server import EmbeddedServer

Kind = Literal["single", "disk", "sentinel", "cluster"]
Pause = Callable[[float, float], Awaitable[None]]
"""Pauses between two steps of a fault; the pause is cut short when the faults are over."""
_PROMOTED_S = 40.0
_SLOTS = 16384
_DISK = "64m"
_BALLAST_BYTES = 64 * 2**10
TOPICS = ("visible", "chunks", "blocks", "runs")
_OLD_ENTRIES = 80
_OLD_MS = 3_600_000
_POLL_S = 0.2
ROOM, ROOM_S = 0.95, 20.0
"""A full server has room again, this share of its limit being in use, within this time, if other faults allow it."""


class NoDisk(Exception):
    """This process may not mount a disk in memory."""


class Single:
    """One server behind a proxy. It writes each command to its file before it replies (``appendfsync always``), so kill
    -9 loses no acknowledged write, and the judge's rules are exact. With ``everysec`` writes may be delayed.
    """

    lossy = False
    """Acknowledged writes may be lost."""

    def __init__(self, server: EmbeddedServer, proxy: Proxy, client: Any) -> None:
        self._server = server
        self.proxy: Proxy | None = proxy
        self.client = client
        self.url = f"redis://127.0.0.1:{proxy.port}"
        self.port = server.port
        """Of the server itself."""

    async def disturb(self, chance: random.Random, pause: Pause) -> AsyncGenerator[str]:
        """Inject kill -9 and a restart on the same data, or SIGSTOP, sometimes for longer than any client waits for a
        reply.

        Yields the fault's name when it begins.
        """
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

    async def limit_memory(self, pause: Pause) -> None:
        """Set the memory limit to what the server uses, for a while."""
        with suppress(RedisError, OSError):
            memory: Any = await self.client.info("memory")
            await self.client.config_set("maxmemory", memory["used_memory"])
        await pause(0.5, 5.0)
        await self._until_accepted(lambda: self.client.config_set("maxmemory", 0))

    async def put_ballast(self, prefix: str, partitions: int) -> None:
        """Give the public topics a past of `_OLD_MS`, which is what a full server forgets first."""
        seconds, _ = await self.client.time()
        for n in range(_OLD_ENTRIES):
            age_ms = _OLD_MS - n * _OLD_MS // _OLD_ENTRIES
            pipe = self.client.pipeline(transaction=False)
            for key in (f"{prefix}:{{{partition}}}:{topic}" for partition in range(partitions) for topic in TOPICS):
                pipe.xadd(key, {"ballast": bytes(_BALLAST_BYTES)}, id=f"{seconds * 1000 - age_ms}-0")
            await pipe.execute(raise_on_error=False)  # a repeated command, after a lost reply, is refused by its id

    async def fill(self, over: asyncio.Event) -> str | None:
        """Set the memory limit to what the server uses, and wait until the deployment made room by itself. What is
        wrong if it did not.
        """
        clock = asyncio.get_running_loop().time
        most = 0

        async def is_full() -> bool:
            nonlocal most
            most = most or (await self.client.info("memory"))["used_memory"]
            return await self.client.config_set("maxmemory", most)

        async def has_room() -> bool:
            return (await self.client.info("memory"))["used_memory"] < ROOM * most

        await self._until_accepted(is_full)
        until, made = clock() + ROOM_S, False
        while not made and clock() < until and not over.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), _POLL_S)
            made = await self._is_so(has_room)
        await self._until_accepted(lambda: self.client.config_set("maxmemory", 0))
        return None if made or over.is_set() else f"no room was made within {ROOM_S:g} s"

    async def _is_so(self, question: Callable[[], Awaitable[bool]]) -> bool:
        with suppress(RedisError, OSError):
            return await question()
        return False

    async def stutter(self, chance: random.Random, over: asyncio.Event) -> None:
        """Stop the server for a moment, again and again."""
        pid = self._server.pid
        for _ in range(chance.randint(5, 25)):
            if over.is_set():
                return
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(chance.uniform(0.02, 0.3))
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(chance.uniform(0.0, 0.1))

    async def _until_accepted(self, command: Callable[[], Awaitable[Any]]) -> None:
        async def taken() -> bool:
            with suppress(RedisError, OSError):
                await command()
                return True
            return False

        await eventually(taken, timeout=_PROMOTED_S)


class SmallDisk(Single):
    """One server whose append-only file is on a disk of its own, which fills up.

    It syncs once a second: with ``always`` a server exits if it cannot write. So it is never killed, and loses nothing.
    """

    def __init__(self, server: EmbeddedServer, proxy: Proxy, client: Any, disk: Path) -> None:
        super().__init__(server, proxy, client)
        self._ballast = disk / "ballast"

    async def disturb(self, chance: random.Random, pause: Pause) -> AsyncGenerator[str]:
        """Fill the disk for a while: the server refuses all writes (MISCONF) until there is room again."""
        yield "a full disk"
        with suppress(OSError), self._ballast.open("wb", buffering=0) as file:
            while file.write(bytes(_BALLAST_BYTES)):
                pass
        await pause(1.0, 6.0)
        self._ballast.unlink()


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
        """kill -9 of the master, or SIGSTOP until another is promoted; then it returns as the replica."""
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
        """Wait until this server follows the master, and Sentinel's state allows it to promote it next."""

        async with Redis(port=port) as client:
            # As Sentinel does it later: clients that are still connected must not read stale data.
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


class Nodes:
    """Three masters of a Cluster, each with a replica that follows asynchronously.

    There is no proxy, because clients connect to the addresses that the nodes announce.
    """

    lossy = True
    proxy: Proxy | None = None

    def __init__(self, group: ClusterGroup, client: Any) -> None:
        self.url = group.url
        self.client = client
        self._servers = {server.port: server for server in group.nodes}

    async def disturb(self, chance: random.Random, pause: Pause) -> AsyncGenerator[str]:
        """kill -9 of one master, or SIGSTOP until its replica is promoted; then it returns as the replica."""
        slot = chance.randrange(_SLOTS)
        old = await self._master(slot, next(iter(self._servers)))
        server = self._servers[old]
        witness = next(port for port in self._servers if port != old)
        killed = chance.random() < 0.6
        yield f"fail-over: {'kill -9' if killed else 'SIGSTOP'} of a Cluster's master"
        os.kill(server.pid, signal.SIGKILL if killed else signal.SIGSTOP)

        async def promoted() -> bool:
            return await self._master(slot, witness) != old

        await eventually(promoted, timeout=_PROMOTED_S)
        if killed:
            await asyncio.to_thread(server.stop)
            await asyncio.to_thread(server.start)
        else:
            await pause(0.0, 2.0)
            os.kill(server.pid, signal.SIGCONT)
        await self._in_step(old)

    async def _master(self, slot: int, requested: int) -> int:
        """The owner of the slot, as reported by the node on the port ``asked``."""
        async with Redis(port=requested) as client:
            ranges: Any = await client.execute_command("CLUSTER SLOTS")
        return next(int(master[1]) for first, last, master, *_ in ranges if first <= slot <= last)

    async def _in_step(self, port: int) -> None:
        """Wait until this server follows its master, and all nodes consider each other healthy."""

        async def follows() -> bool:
            async with Redis(port=port) as client:
                replication: Any = await client.info("replication")
                return replication.get("master_link_status") == "up"

        async def well() -> bool:
            for request in self._servers:
                async with Redis(port=request, decode_responses=True) as client:
                    nodes: Any = await client.execute_command("CLUSTER NODES")
                    state: Any = await client.execute_command("CLUSTER INFO")
                if "fail" in str(nodes) or state["cluster_state"] != "ok":
                    return False
            return True

        await eventually(follows, timeout=_PROMOTED_S)
        await eventually(well, timeout=_PROMOTED_S)


Deployed = Single | Group | Nodes


@asynccontextmanager
async def single(directory: Path) -> AsyncGenerator[Deployed]:
    """One server. It accepts entries that no worker should hold."""
    options = {"appendfsync": "always", "loglevel": "warning", "proto-max-bulk-len": "512mb"}
    server = EmbeddedServer(directory / "server", binary=binary(), appendonly=True, options=options)
    async with AsyncExitStack() as stack:
        await asyncio.to_thread(server.start)
        stack.push_async_callback(asyncio.to_thread, server.stop)
        proxy = await stack.enter_async_context(Proxy(server.port))
        client = await stack.enter_async_context(Redis(port=server.port))
        yield Single(server, proxy, client)


@asynccontextmanager
async def small_disk(directory: Path) -> AsyncGenerator[Deployed]:
    """One server on a disk in memory. Raises NoDisk if none can be mounted."""
    disk = directory / "disk"
    disk.mkdir()
    if problem := await _run("mount", "-t", "tmpfs", "-o", f"size={_DISK}", "tmpfs", str(disk)):
        raise NoDisk(problem)
    try:
        # The file is rewritten as soon as it has doubled, so that it does not fill the disk by itself for long.
        options = {"appendfsync": "everysec", "loglevel": "warning", "auto-aof-rewrite-min-size": "4mb"}
        server = EmbeddedServer(disk / "server", binary=binary(), appendonly=True, options=options)
        async with AsyncExitStack() as stack:
            await asyncio.to_thread(server.start)
            stack.push_async_callback(asyncio.to_thread, server.stop)
            proxy = await stack.enter_async_context(Proxy(server.port))
            client = await stack.enter_async_context(Redis(port=server.port))
            yield SmallDisk(server, proxy, client, disk)
    finally:
        await _run("umount", str(disk))


async def _run(*command: str) -> str | None:
    """Run a command; return its error output, or None if it succeeded."""
    try:
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    except OSError as e:
        return f"{command[0]}: {e.strerror}"
    _, output = await process.communicate()
    return output.decode(errors="replace").strip() or "failed" if process.returncode else None


@asynccontextmanager
async def group(directory: Path) -> AsyncGenerator[Deployed]:
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


@asynccontextmanager
async def nodes(directory: Path) -> AsyncGenerator[Deployed]:
    """A Cluster. A replica is promoted regardless of its last contact with its master; until then all nodes refuse."""
    servers = cluster_group(replicas=1, directory=directory / "nodes", cluster_replica_validity_factor="0")
    running = await asyncio.to_thread(servers.__enter__)
    try:
        async with RedisCluster(
            startup_nodes=[ClusterNode("127.0.0.1", node.port) for node in running.nodes]
        ) as client:
            yield Nodes(running, client)
    finally:
        await asyncio.to_thread(servers.__exit__, None, None, None)


KINDS: dict[Kind, Any] = {"single": single, "disk": small_disk, "sentinel": group, "cluster": nodes}
"""Makes the server of a deployment, by kind."""
