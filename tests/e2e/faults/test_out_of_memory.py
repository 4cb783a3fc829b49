"""A server without memory, or without disk, under running services: what is open ends, and nothing of it is torn."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client import CollectorRegistry
from redis.exceptions import ResponseError

from tests.e2e import judge
from tests.e2e.conftest import WEATHER, Send, sender
from tests.e2e.faults.test_disturbed import TURNS, undisturbed
from tests.e2e.fleet import WITH_TOOLS, Fleet, Worker, ended, fleet, log_of
from tests.servers import binary
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import Delivery, MockProvider, Script, Turn
from tokenbus_services.process.embedded_server import EmbeddedServer
from tokenbus_services.runtime.metrics.worker_metrics import DeploymentGauges

RUNS = 6
BALLAST = 256 * 2**20
"""Large beside what the runs of a test take, so that their end does not make room for another."""
DISK_MB = 32
TOML = "[retry]\nmax_attempts = 2\nbase_delay_s = 0.1\n"
STORY = Script(name="story", turns=tuple(Turn(says=reply, delivery=Delivery(pace=40)) for reply in TURNS))


class Scene(msgspec.Struct):
    """Services on a server of their own, with runs under way."""

    server: Server
    keys: Keys
    send: Send
    fleet: Fleet
    runs: list[str]

    async def start(self, run: str) -> None:
        """One more run."""
        await self.send("story", run, id=run, tools=[WEATHER], provider="openai-chat")
        self.runs.append(run)

    async def logs(self) -> dict[str, Any]:
        """What each run came to."""
        return await ended(self.server.client, self.keys, self.runs)

    async def ready(self) -> None:
        """Wait until all services are."""
        for worker in self.fleet.workers:
            await eventually(lambda w=worker: _is_ready(w), timeout=60)


async def _is_ready(worker: Worker) -> bool:
    async with httpx.AsyncClient(timeout=60) as http:
        return (await http.get(f"{worker.url}/ready")).status_code == 200


@asynccontextmanager
async def under_way(directory: Path, process: EmbeddedServer) -> AsyncGenerator[Scene]:
    keys = Keys(prefix="full", partitions=2)
    async with (
        MockProvider([STORY]) as provider,
        fleet(directory, process.url, keys, provider.url, WITH_TOOLS, TOML) as running,
        Server(process.url) as server,
    ):
        scene = Scene(server, keys, sender(server, keys), running, [])
        for n in range(RUNS):
            await scene.start(f"run{n}")

        async def received() -> bool:
            return all([len(await log_of(server.client, keys, run)) > 5 for run in scene.runs])

        await eventually(received, timeout=60)
        yield scene


def check_whole(run: str, log: Any) -> None:
    """As if nothing had happened."""
    judge.check(log)
    assert log[-1]["type"] == "completed", log[-1]
    [result] = [content for kind, content in judge.blocks(log) if kind == "tool_result"]
    assert [b for b in judge.blocks(log) if b[0] != "thinking"] == [
        b for b in undisturbed(run, result) if b[0] != "thinking"
    ]


async def test_on_a_full_server_open_runs_end_and_afterwards_new_runs_work(tmp_path: Path) -> None:
    with EmbeddedServer(binary=binary()) as process:
        async with under_way(tmp_path, process) as scene:
            await scene.server.client.config_set("maxmemory", 1)
            with pytest.raises(ResponseError, match="maxmemory"):
                await scene.start("refused")
            logs = await scene.logs()
            await scene.ready()
            assert [worker.process.returncode for worker in scene.fleet.workers] == [None] * len(WITH_TOOLS)
            for partition in range(scene.keys.partitions):
                assert not await scene.server.client.xlen(scene.keys.topic(partition, "turns"))
            await scene.server.client.config_set("maxmemory", 0)
            await scene.start("later")
            check_whole("later", (await scene.logs())["later"])
    for log in logs.values():
        judge.check(log)
        if log[-1]["type"] != "completed":  # what waited for its tool's result had nothing more to say
            assert log[-1]["error"]["code"] == "server_full", log[-1]


async def test_what_memory_is_left_is_kept_for_the_runs_that_are_open(tmp_path: Path) -> None:
    with EmbeddedServer(binary=binary()) as process:
        async with under_way(tmp_path, process) as scene:
            client = scene.server.client
            for n in range(4):
                await client.setrange(
                    f"ballast-{n}", BALLAST // 4 - 1, b"x"
                )  # no buffer of that size, which would be freed soon
            used = (await client.info("memory"))["used_memory"]
            await client.config_set("maxmemory", round(used / 0.95))
            open_runs = list(scene.runs)
            await scene.start("late")
            for run, log in (await ended(client, scene.keys, open_runs)).items():
                check_whole(run, log)
            assert not await client.exists(scene.keys.run("late"))
            await scene.ready()
            await client.delete(*(f"ballast-{n}" for n in range(4)))
            check_whole("late", (await scene.logs())["late"])


@pytest.fixture
def small_disk(tmp_path: Path) -> Generator[Path]:
    """A file system of `DISK_MB`."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "none", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def fill(file: Path) -> None:
    with file.open("wb", buffering=0) as ballast:
        while True:
            ballast.write(bytes(2**16))


@pytest.mark.parametrize(
    ("options", "status"),
    [({"appendonly": "yes"}, "aof_last_write_status"), ({"save": "1 1"}, "rdb_last_bgsave_status")],
    ids=["aof", "rdb"],
)
async def test_all_runs_continue_without_loss_after_a_full_disk(
    tmp_path: Path, small_disk: Path, options: dict[str, str], status: str
) -> None:
    with EmbeddedServer(small_disk, binary=binary(), options=options) as process:
        async with under_way(tmp_path, process) as scene:
            client = scene.server.client
            ballast = small_disk / "ballast"
            with pytest.raises(OSError, match="No space"):
                fill(ballast)

            async def refuses() -> bool:
                return (await client.info("persistence"))[status] == "err"

            await eventually(refuses, timeout=60)
            registry = CollectorRegistry()
            gauges = DeploymentGauges(registry, scene.server, scene.keys, judged=False, recorded=False)
            await gauges.measure()
            about = {"server": scene.server.url.safe, "state": status}
            assert registry.get_sample_value("tokenbus_server_disk_fault", about) == 1
            ballast.unlink()
            await eventually(lambda: _is_well(client, status), timeout=60)
            await gauges.measure()
            assert registry.get_sample_value("tokenbus_server_disk_fault", about) == 0
            await scene.start("later")
            logs = await scene.logs()
            await scene.ready()
    for run in scene.runs:
        check_whole(run, logs[run])


async def _is_well(client: Any, status: str) -> bool:
    return (await client.info("persistence"))[status] == "ok"
