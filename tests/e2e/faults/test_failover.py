"""A fail-over under running services: losses are reported, and no subscriber gets two versions of a run.

What another node of a Cluster has comes out whole.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import RedisError

from tests.e2e import judge
from tests.e2e.conftest import sender
from tests.e2e.fleet import PIPELINE, Kind, ended, fleet
from tests.servers import binary, cluster_group, part_from_replicas, sentinel_group
from tests.waiting import eventually
from tokenbus import Client
from tokenbus.bus.keys import PUBLIC_TOPICS, Keys
from tokenbus.bus.liveness import stop_task
from tokenbus.bus.server.server import Server
from tokenbus.bus.server.stream_reader import StreamReader
from tokenbus.errors import WriteNotReplicated
from tokenbus_services.mock_provider import Delivery, MockProvider, Reply, Script, ToolCall, Turn
from tokenbus_services.process.embedded_server import EmbeddedServer

KEYS = Keys(prefix="failover", partitions=4)
RUNS = 8
WORDS = " ".join(f"word{n}" for n in range(800))
"""Takes 13 s, so it still streams at the fail-over, also on a slow machine."""


class Listener:
    """Reads all topics from the beginning, across a change of the server, and keeps every event."""

    def __init__(self, server: Server, keys: Keys) -> None:
        self.received: defaultdict[str, dict[int, set[bytes]]] = defaultdict(lambda: defaultdict(set))
        self._reader = StreamReader(server, count=500)
        self._offsets = {keys.topic(p, topic): "0-0" for p in range(keys.partitions) for topic in PUBLIC_TOPICS}

    async def listen(self) -> None:
        try:
            while True:
                try:
                    found = await self._reader.read(self._offsets)
                except (RedisError, OSError):
                    await asyncio.sleep(0.01)
                    continue
                for stream, entries in found:
                    self._offsets[stream] = entries[-1][0].decode()
                    for _, fields in entries:
                        event = json.loads(fields[b"__data__"])
                        self.received[event["run"]][event["seq"]].add(fields[b"__data__"])
        finally:
            await self._reader.close()


@dataclass
class Failing:
    """A server that will fail over."""

    url: str
    part: Callable[[], None]
    """What is written after this, the fail-over will lose."""
    fail: Callable[[], None]
    concerns: Callable[[str], bool]
    """Whether this run is among what fails over."""


@contextmanager
def sentinels(directory: Path) -> Generator[Failing]:
    with sentinel_group(directory, down_after_ms=5000) as group:  # the runs write for a while between part and fail
        yield Failing(group.url, group.part, group.master.stop, lambda run: True)


@contextmanager
def node_of_a_cluster(directory: Path) -> Generator[Failing]:
    with cluster_group(replicas=1) as group:
        node = group.master_of(KEYS.topic(0, "raw"))
        slots = {p for p in range(KEYS.partitions) if group.master_of(KEYS.topic(p, "raw")) is node}
        yield Failing(
            group.url,
            lambda: part_from_replicas(node.port),
            node.stop,
            lambda run: KEYS.partition_of(run) in slots,
        )


@pytest.mark.parametrize("kind", [sentinels, node_of_a_cluster])
async def test_runs_that_a_fail_over_lost_end_incomplete_under_their_published_numbers(
    kind: Callable[[Path], AbstractContextManager[Failing]], tmp_path: Path
) -> None:
    keys = KEYS
    script = Script(name="story", turns=(Turn(says=Reply(text=WORDS), delivery=Delivery(pace=60)),))
    short = Script(name="short", turns=(Turn(says=Reply(text="All is well.")),))
    with kind(tmp_path) as group:
        async with (
            MockProvider([script, short]) as provider,
            fleet(tmp_path, group.url, keys, provider.url, PIPELINE),
            Server(group.url) as server,
            Server(group.url) as ears,
            AsyncExitStack() as listening,
        ):
            send = sender(server, keys)
            listener = Listener(ears, keys)
            listening.push_async_callback(stop_task, asyncio.create_task(listener.listen()))
            runs = [f"run{n}" for n in range(RUNS)]
            for run in runs:
                await send("story", "tell", id=run, provider="openai-chat")

            def all_received(number: int) -> bool:
                return all(len(listener.received[run]) > number for run in runs)

            await eventually(lambda: all_received(8), timeout=60)
            await asyncio.to_thread(group.part)
            parted = {run: max(listener.received[run]) for run in runs}
            await eventually(lambda: all(max(listener.received[run]) > parted[run] + 5 for run in runs), timeout=60)
            await asyncio.to_thread(group.fail)
            logs: Any = await ended(_Patient(server), keys, runs)
            await send("short", "tell", id="after", provider="openai-chat")
            logs |= await ended(_Patient(server), keys, ["after"])
    for run in runs:
        judge.check(logs[run])
        last = logs[run][-1]
        if group.concerns(run):
            assert (last["type"], last["error"]["code"]) == ("incomplete", "server_lost_writes")
        else:
            assert last["type"] == "completed"
            assert judge.text(logs[run]) == WORDS
        logged = {event["seq"]: event for event in logs[run]}
        for seq, versions in listener.received[run].items():
            assert len(versions) == 1, f"two stories under {run} {seq}"
            assert json.loads(versions.pop()) == logged[seq]
    assert judge.text(logs["after"]) == "All is well."


async def test_no_end_that_a_reader_had_of_a_durable_run_is_lost_with_the_server_and_its_workers(tmp_path: Path):
    """While nothing is replicated, requests are refused, tools do not run, and no durable run has an end."""
    keys = Keys(prefix="durable", partitions=2)
    says = {
        "short": (Turn(says=Reply(text="All is well.")),),
        "story": (Turn(says=Reply(text=WORDS[:1200]), delivery=Delivery(pace=60)),),
        "calls": (
            Turn(
                says=Reply(text=WORDS[:1200], tool_calls=(ToolCall(name="weather", arguments={"city": "Bern"}),)),
                delivery=Delivery(pace=60),
            ),
            Turn(says=Reply(text="Sunny.")),
        ),
    }
    scripts = [Script(name=name, turns=turns) for name, turns in says.items()]
    kinds: tuple[Kind, ...] = (*PIPELINE, "tools")

    def request(model: str, durability: str = "replicated") -> dict[str, Any]:
        messages = [{"role": "user", "content": "tell"}]
        run = {"id": f"{model}.{durability}", "durability": durability, "on_failure": "restart"}
        return {"provider": "openai-chat", "model": model, "messages": messages, "tools": [{"name": "weather"}], **run}

    with sentinel_group(tmp_path, down_after_ms=5000) as group:
        async with (
            MockProvider(scripts) as provider,
            fleet(
                tmp_path, group.url, keys, provider.url, (*PIPELINE, "tools"), "[durability]\nreplicas = 1"
            ) as running,
            Server(group.url) as server,
            Server(group.url) as ears,
            Client(group.url, prefix=keys.prefix, partitions=2) as client,
            AsyncExitStack() as listening,
        ):
            listener = Listener(ears, keys)
            listening.push_async_callback(stop_task, asyncio.create_task(listener.listen()))

            def heard(run: str, *kinds: str) -> list[str]:
                events = [json.loads(each) for versions in listener.received[run].values() for each in versions]
                return [event["type"] for event in events if event["type"] in kinds]

            assert (await client.result(await client.publish(request("short")))).text == "All is well."
            told = await client.publish(request("story")), await client.publish(request("calls"))
            await client.publish(request("story", "server"))
            await eventually(lambda: all(len(listener.received[run.id]) > 8 for run in told), timeout=60)
            await asyncio.to_thread(group.part)
            with pytest.raises(WriteNotReplicated):
                await client.publish({**request("short"), "id": "refused"})
            await eventually(lambda: heard("story.server", *judge.TERMINAL), timeout=60)
            await eventually(lambda: all(heard(run.id, "block_complete") for run in told), timeout=60)
            await eventually(lambda: heard("refused", "block_complete"), timeout=60)  # the master has it, though
            for run in ("refused", *(run.id for run in told)):
                assert not heard(run, *judge.TERMINAL, "tool_result")
            for worker in running.workers:
                worker.kill()
            await asyncio.to_thread(group.master.stop)
            replica_of_it = {"replicaof": f"127.0.0.1 {group.replica.port}"}
            with EmbeddedServer(binary=binary(), options=replica_of_it):
                await eventually(server.answers, timeout=60)
                await running.start(*kinds)
                runs = [request("short")["id"], *(run.id for run in told)]
                logs: Any = await ended(_Patient(server), keys, runs)
                await eventually(lambda: all(heard(run, *judge.TERMINAL) for run in runs), timeout=60)
    for run in runs:
        judge.check(logs[run])
        assert logs[run][-1]["type"] == "completed"
        assert heard(run, *judge.TERMINAL) == ["completed"]


class _Patient:
    """Reads that wait for the fail-over."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def xrange(self, *args: Any) -> Any:
        async def found() -> Any:
            try:
                return [await self._server.client.xrange(*args)]
            except (RedisError, OSError):
                return None

        return (await eventually(found, timeout=60))[0]
