"""A server without memory, or without disk, under running services: what is open ends, and nothing of it is torn."""

from __future__ import annotations

import asyncio
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
from tokenbus import Client
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import Delivery, MockProvider, Reply, Script, Turn
from tokenbus_services.process.embedded_server import EmbeddedServer
from tokenbus_services.runtime.deployment_snapshot import DeploymentReader
from tokenbus_services.runtime.metrics import DeploymentGauges

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
            reader = DeploymentReader(scene.server, scene.keys, further=(), judged=False, workers=False)
            gauges = DeploymentGauges(registry, scene.server, reader)
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


async def test_ended_runs_and_public_events_make_room_for_what_waits_and_open_runs_stay_whole(tmp_path: Path) -> None:
    """Twice as much as the server has room for, request by request: all are served, without an operator."""
    keys, room = Keys(prefix="room", partitions=2), 16 * 2**20
    scripts = [
        Script(name="short", turns=(Turn(says=Reply(text="One two three.")),)),
        Script(name="open", turns=(Turn(says=Reply(text="word " * 400), delivery=Delivery(pace=40)),)),
    ]
    with EmbeddedServer(binary=binary()) as process:
        async with (
            MockProvider(scripts) as provider,
            fleet(tmp_path, process.url, keys, provider.url, WITH_TOOLS) as running,
            Server(process.url) as server,
            Client(process.url, prefix=keys.prefix, partitions=keys.partitions) as bus,
        ):
            send, client = sender(server, keys), server.client
            stays = [await send("open") for _ in range(3)]
            readers = [asyncio.create_task(bus.result(run)) for run in stays]
            await eventually(lambda: all_begun(server, keys, stays))
            await client.config_set("maxmemory", (await client.info("memory"))["used_memory"] + room)
            runs: list[str] = []

            async def sent() -> bool:
                if await client.xlen(keys.requests) > 8:
                    return False
                try:
                    runs.append(await send("short", "y" * (room // 200)))
                except ResponseError:  # OOM: room is being made
                    return False
                return True

            for _ in range(400):
                await eventually(sent)

            async def all_served() -> bool:
                return not await client.xlen(keys.requests) and not await open_but(client, keys, stays)

            await eventually(all_served)
            statuses = [await client.hget(keys.run(run), "status") for run in runs]
            assert set(statuses[:50]) == {None}, "the oldest runs made room"
            assert set(statuses) == {None, b"completed"}
            results = await asyncio.gather(*readers)
            log = "".join(worker.log.read_text() for worker in running.workers)
    assert "room_made" in log
    assert {result.text for result in results} == {"word " * 400}


async def all_begun(server: Server, keys: Keys, runs: list[str]) -> bool:
    return all([len(await log_of(server.client, keys, run)) > 3 for run in runs])


async def open_but(client: Any, keys: Keys, but: list[str]) -> set[str]:
    """The open runs, except these."""
    listed = [await client.zrange(keys.open_runs(partition), 0, -1) for partition in range(keys.partitions)]
    return {run.decode() for each in listed for run in each} - set(but)
