"""Real servers for tests: the one that most tests share, and a Sentinel group and a Cluster of their own.

All from one binary, as processes on private ports of 127.0.0.1.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import warnings
from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import redis

from tests.waiting import eventually, eventually_sync
from tokenbus.errors import ServerUnavailable
from tokenbus_services.process import parent_guard as guard
from tokenbus_services.process.embedded_server import EmbeddedServer, carried_binary, find_binary, free_port

IMAGES = ("valkey/valkey:9", "redis:7")
MASTER = "main"


def binary() -> Path:
    """`TOKENBUS_TEST_SERVER`, else the one that the lock file pins, else what the machine has."""
    if chosen := os.environ.get("TOKENBUS_TEST_SERVER"):
        return Path(chosen)
    return carried_binary() or find_binary()


@contextmanager
def shared_server() -> Generator[str]:
    """The url of the server under test; CONTRIBUTING.md says which."""
    if url := os.environ.get("TOKENBUS_REDIS_URL"):
        yield url
    elif "TOKENBUS_TEST_SERVER" not in os.environ and (image := image_here()):
        with container(image) as url:
            yield url
    else:
        with EmbeddedServer(binary=binary()) as server:
            yield server.url


@contextmanager
def container(image: str) -> Generator[str]:
    """A server in a container; never pulls."""
    from testcontainers.community.redis import RedisContainer
    from testcontainers.core.config import testcontainers_config

    testcontainers_config.ryuk_disabled = True  # its image is one more that would have to be there
    with RedisContainer(image) as server:
        yield f"redis://{server.get_container_host_ip()}:{server.get_exposed_port(6379)}"


def image_here() -> str | None:
    """A server image that a Docker engine here already has."""
    import docker
    from docker.errors import DockerException

    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        try:
            with closing(docker.from_env(timeout=3)) as engine:
                here = {tag for image in engine.images.list() for tag in image.tags}
        except DockerException:
            here = set[str]()
        gc.collect()  # docker leaves a socket open when no engine answers
    return next((name for name in IMAGES if name in here), None)


async def save(client: Any, *, timeout: float = 60.0) -> None:
    """Let the server save what it has to its `dump.rdb`, and wait until it has.

    Not by LASTSAVE, which two saves within a second do not change, nor by `rdb_saves`, which counts their beginnings.
    """
    await client.bgsave()

    async def saved() -> bool:
        said = await client.info("persistence")
        return not said["rdb_bgsave_in_progress"] and said["rdb_last_bgsave_status"] == "ok"

    await eventually(saved, timeout=timeout)


class ClusterGroup:
    """The nodes of a Cluster, as processes: the masters first, then the replicas of each in turn."""

    def __init__(self, nodes: list[EmbeddedServer]) -> None:
        self.nodes = nodes
        self.url = "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)

    def master_of(self, key: str) -> EmbeddedServer:
        """The process that has this key now, according to another node."""
        for node in self.nodes:
            with closing(redis.Redis(port=node.port, decode_responses=True)) as client:
                try:
                    slot = client.execute_command("CLUSTER KEYSLOT", key)
                    ranges: Any = client.execute_command("CLUSTER SLOTS")
                except redis.RedisError:
                    continue
            port = next(master[1] for first, last, master, *_ in ranges if first <= slot <= last)
            return next(node for node in self.nodes if node.port == port)
        raise AssertionError("no node answers")


@contextmanager
def cluster(nodes: int = 3) -> Generator[str]:
    """The url of a Cluster that is up: masters alone, the slots in equal parts."""
    with cluster_group(nodes) as group:
        yield group.url


@contextmanager
def cluster_group(
    masters: int = 3, *, replicas: int = 0, directory: Path | None = None, **more: str
) -> Generator[ClusterGroup]:
    """A running Cluster: slots in equal parts, this many replicas for each master; ``more``: options.

    With a ``directory`` a node that was stopped may be started again: it knows who it was.
    """
    with ExitStack() as stack:
        servers: list[EmbeddedServer] = []
        clients: list[redis.Redis] = []
        nodes = masters * (1 + replicas)
        for i in range(nodes):
            # If no replica can follow a node, none may count as failed: a loaded machine lets a node wait for seconds.
            timeout_ms = "2000" if replicas else "60000"
            options = {"cluster-enabled": "yes", "cluster-node-timeout": timeout_ms, "repl-diskless-sync-delay": "0"}
            options |= {name.replace("_", "-"): value for name, value in more.items()}
            server, cluster_port = _node(directory / f"node{i}" if directory else None, options)
            servers.append(stack.enter_context(server))
            clients.append(stack.enter_context(closing(redis.Redis(port=servers[i].port))))
            clients[i].execute_command("CLUSTER SET-CONFIG-EPOCH", i + 1)
            if i < masters:
                first, last = 16384 * i // masters, 16384 * (i + 1) // masters - 1
                clients[i].execute_command("CLUSTER ADDSLOTSRANGE", first, last)
            clients[0].execute_command("CLUSTER MEET", "127.0.0.1", servers[i].port, cluster_port)
        for client in clients:
            eventually_sync(lambda c=client: _sees(c, nodes))
        for i in range(masters, nodes):
            master: Any = clients[(i - masters) % masters].execute_command("CLUSTER MYID")
            clients[i].execute_command("CLUSTER REPLICATE", master)
            eventually_sync(lambda c=clients[i]: c.info("replication")["master_link_status"] == "up")
        yield ClusterGroup(servers)


def _node(home: Path | None, options: dict[str, str]) -> tuple[EmbeddedServer, int]:
    """A running server and its second port, which is another one if a process has taken it since."""
    tries = 3
    while True:
        port = free_port()
        server = EmbeddedServer(home, binary=binary(), options={**options, "cluster-port": str(port)})
        try:
            server.start()
            return server, port
        except ServerUnavailable:
            tries -= 1
            if not tries:
                raise


def _sees(node: redis.Redis, nodes: int) -> bool:
    info: Any = node.execute_command("CLUSTER INFO")
    whole = info["cluster_slots_ok"] == "16384"  # without full coverage, the state is ok before that
    return whole and info["cluster_state"] == "ok" and info["cluster_known_nodes"] == str(nodes)


def part_from_replicas(port: int) -> None:
    """The master on this port refuses all replicas from now on."""
    with closing(redis.Redis(port=port)) as master:
        master.execute_command("ACL SETUSER default -psync -sync")
        master.execute_command("CLIENT KILL TYPE replica")


class SentinelGroup:
    """A master, its replica and one sentinel that watches them."""

    def __init__(self, master: EmbeddedServer, replica: EmbeddedServer, sentinel_port: int) -> None:
        self.master = master
        self.replica = replica
        self.url = f"redis+sentinel://127.0.0.1:{sentinel_port}/{MASTER}"

    def part(self) -> None:
        """Stop replication: a fail-over loses what the master writes from now on."""
        part_from_replicas(self.master.port)


@contextmanager
def sentinel_group(directory: Path, *, down_after_ms: int = 2000) -> Generator[SentinelGroup]:
    """A group that is ready for a fail-over; `master.stop()` begins one. After `part` it must begin within ten times
    ``down_after_ms``: the sentinel promotes no replica that was without its master for longer.
    """
    with ExitStack() as stack:
        master = stack.enter_context(EmbeddedServer(binary=binary(), options={"repl-diskless-sync-delay": "0"}))
        following = {"replicaof": f"127.0.0.1 {master.port}"}
        replica = stack.enter_context(EmbeddedServer(binary=binary(), options=following))
        # The sentinel looks at a replica every 10 s: it must see this one in step at its first look.
        client = stack.enter_context(closing(redis.Redis(port=replica.port)))
        eventually_sync(lambda: client.info("replication")["master_link_status"] == "up")
        port = free_port()
        stack.enter_context(_sentinel(directory, port, master.port, down_after_ms))
        sentinel = stack.enter_context(closing(redis.Redis(port=port, decode_responses=True)))
        eventually_sync(lambda: _watches(sentinel))
        yield SentinelGroup(master, replica, port)


@contextmanager
def _sentinel(directory: Path, port: int, master_port: int, down_after_ms: int) -> Generator[None]:
    config = directory / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {directory}\n"
        f"sentinel monitor {MASTER} 127.0.0.1 {master_port} 1\n"
        f"sentinel down-after-milliseconds {MASTER} {down_after_ms}\n"
        f"sentinel failover-timeout {MASTER} 3000\n"
    )
    path = directory / "sentinel.log"
    command = [sys.executable, guard.__file__, str(binary()), str(config), "--sentinel"]
    with (
        path.open("wb") as log,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log) as process,
    ):
        try:
            yield
        except BaseException as e:  # whether it failed over at all is known only to it
            e.add_note(f"the sentinel, status {process.poll()}:\n{path.read_text()[-4000:]}")
            raise
        finally:
            assert process.stdin
            process.stdin.close()


def _watches(sentinel: redis.Redis) -> bool:
    """Whether it knows the replica well enough to promote it."""
    try:
        replicas: list[dict[str, object]] = sentinel.sentinel_slaves(MASTER)
    except redis.ConnectionError:
        return False
    return any(r["flags"] == "slave" and r["master-link-status"] == "ok" for r in replicas)
