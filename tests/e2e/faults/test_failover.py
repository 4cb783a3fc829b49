"""A fail-over under running services: losses are reported, and no subscriber gets two versions of a run.

What another node of a Cluster has comes out whole.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import RedisError

from tests.e2e import judge
from tests.e2e.conftest import sender
from tests.e2e.fleet import PIPELINE, WITH_TOOLS, Kind, ended, fleet
from tests.servers import binary, cluster_group, part_from_replicas, sentinel_group
from tests.waiting import eventually
from tokenbus import Appended, Chunk, Client, RunEnded, SessionStep, TreeStep
from tokenbus.bus.keys import PUBLIC_TOPICS, Keys
from tokenbus.bus.liveness import stop_task
from tokenbus.bus.server.server import Server
from tokenbus.bus.server.stream_reader import StreamReader
from tokenbus.errors import WriteNotReplicated
from tokenbus.events.public import encode
from tokenbus_services.mock_provider import Delivery, MockProvider, Reply, Script, Stall, ToolCall, Turn
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
        "asks": (
            Turn(says=Reply(tool_calls=(ToolCall(name="weather", arguments={"city": "Chur"}),))),
            Turn(says=Reply(text="Snow.")),
        ),
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
        tool = {"name": "weather", "approval": "always" if model == "asks" else "never"}
        return {"provider": "openai-chat", "model": model, "messages": messages, "tools": [tool], **run}

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

            async def approved() -> bool:
                with suppress(WriteNotReplicated):
                    return (await client.approve(asking, "0.0", decision_id="ours")).durable
                return False

            assert (await client.result(await client.publish(request("short")))).text == "All is well."
            asking = await client.publish(request("asks"))
            await eventually(lambda: heard(asking.id, "waiting"), timeout=60)
            told = await client.publish(request("story")), await client.publish(request("calls"))
            await client.publish(request("story", "server"))
            await eventually(lambda: all(len(listener.received[run.id]) > 8 for run in told), timeout=60)
            await asyncio.to_thread(group.part)
            with pytest.raises(WriteNotReplicated):
                await client.publish({**request("short"), "id": "refused"})
            await eventually(lambda: heard("story.server", *judge.TERMINAL), timeout=60)
            await eventually(lambda: all(heard(run.id, "block_complete") for run in told), timeout=60)
            await eventually(lambda: heard("refused", "block_complete"), timeout=60)  # the master has it, though
            with pytest.raises(WriteNotReplicated):
                await client.approve(asking, "0.0", decision_id="ours")
            for run in ("refused", asking.id, *(run.id for run in told)):
                assert not heard(run, *judge.TERMINAL, "tool_result")
            for worker in running.workers:
                worker.kill()
            await asyncio.to_thread(group.master.stop)
            replica_of_it = {"replicaof": f"127.0.0.1 {group.replica.port}"}
            with EmbeddedServer(binary=binary(), options=replica_of_it):
                await eventually(server.answers, timeout=60)
                await running.start(*kinds)
                await eventually(approved, timeout=60)
                runs = [request("short")["id"], asking.id, *(run.id for run in told)]
                logs: Any = await ended(_Patient(server), keys, runs)
                await eventually(lambda: all(heard(run, *judge.TERMINAL) for run in runs), timeout=60)
    for run in runs:
        judge.check(logs[run])
        assert logs[run][-1]["type"] == "completed"
        assert heard(run, *judge.TERMINAL) == ["completed"]


HELPERS = """
[tools.slow]
kind = "run"
provider = "openai-chat"
model = "story"
[tools.quick]
kind = "run"
provider = "openai-chat"
model = "short"
"""


async def test_readers_of_a_tree_have_one_order_and_every_word_after_a_fail_over_that_lost_its_entries(
    tmp_path: Path,
) -> None:
    """Lost are: words of a child; the beginning of a tree with its first child; and a whole tree with its end."""
    keys = Keys(prefix="trees", partitions=2)

    def asks(name: str, tool: str, fault: Stall | None) -> Script:
        says = Reply(text="Asks for it.", tool_calls=(ToolCall(name=tool, arguments={"task": "go"}),))
        return Script(name=name, turns=(Turn(says=says, fault=fault), Turn(says=Reply(text="Thanks."))))

    scripts = [
        Script(name="story", turns=(Turn(says=Reply(text=WORDS), delivery=Delivery(pace=60)),)),
        Script(name="short", turns=(Turn(says=Reply(text="All is well.")),)),
        asks("words", "slow", None),
        asks("beginning", "slow", Stall(after_text="Asks")),
        asks("whole", "quick", Stall(after_text="Asks")),
    ]
    runs = ("words", "beginning", "whole")
    with sentinel_group(tmp_path, down_after_ms=5000) as group:
        async with (
            MockProvider(scripts) as provider,
            fleet(tmp_path, group.url, keys, provider.url, WITH_TOOLS, HELPERS),
            Server(group.url) as server,
            Client(group.url, prefix=keys.prefix, partitions=2) as client,
            AsyncExitStack() as reading,
        ):
            live: dict[str, list[TreeStep]] = {run: [] for run in runs}

            async def read(run: str) -> None:
                async for step in client.follow_tree(run):
                    live[run].append(step)

            readers = {run: asyncio.create_task(read(run)) for run in runs}
            for task in readers.values():
                reading.push_async_callback(stop_task, task)

            def heard(run: str, kind: str) -> int:
                return sum(step.event.__struct_config__.tag == kind for step in live[run])

            send = sender(server, keys)
            for run in runs:
                tools = [{"name": "slow"}, {"name": "quick"}]
                await send(run, "go", id=run, provider="openai-chat", tools=tools, on_failure="fail")
            await eventually(lambda: heard("words", "chunk") > 8, timeout=60)
            await eventually(lambda: heard("beginning", "chunk") and heard("whole", "chunk"), timeout=60)
            await asyncio.to_thread(group.part)
            before = heard("words", "chunk")
            for exchange in provider.requests:
                if exchange.state == "stalled":
                    provider.resume(exchange)
            await eventually(lambda: heard("whole", "completed") == 2, timeout=60)
            await eventually(lambda: heard("beginning", "chunk") > 8, timeout=60)
            await eventually(lambda: heard("words", "chunk") > before + 5, timeout=60)
            await asyncio.to_thread(group.master.stop)
            trees = {run: [run, f"{run}~1"] for run in runs}
            logs: Any = await ended(_Patient(server), keys, [each for tree in trees.values() for each in tree])
            async with asyncio.timeout(60):
                await asyncio.gather(*readers.values())
            order = {run: await server.client.xrange(keys.tree(run)) for run in runs}
            for run in runs:
                later = [step async for step in client.follow_tree(run)]
                assert [(step.event, step.path) for step in later] == [(step.event, step.path) for step in live[run]]
                for n in {0, len(later) // 2, len(later) - 2}:
                    for cursor in (live[run][n].cursor, later[n].cursor):  # one of them may name an entry that was lost
                        rest = [step.event async for step in client.follow_tree(run, after=cursor)]
                        assert rest == [step.event for step in later[n + 1 :]]
    for run, tree in trees.items():
        for each in tree:
            judge.check(logs[each])
            told = [json.loads(encode(step.event)) for step in live[run] if step.event.run == each]
            assert told == logs[each], "exactly its words, as the log has them"
        entries = [(name.decode(), value.decode()) for _, fields in order[run] for name, value in fields.items()]
        judge.check_tree(entries, {each: logs[each] for each in tree})
    ends = {each: (log[-1]["type"], log[-1].get("error", {}).get("code")) for each, log in logs.items()}
    lost = ("incomplete", "server_lost_writes")
    assert ends == {
        "words": ("completed", None),
        "words~1": lost,
        "beginning": lost,
        "beginning~1": lost,
        "whole": ("completed", None),
        "whole~1": ("completed", None),
    }


async def test_a_session_goes_on_after_a_fail_over_that_lost_a_message_and_its_readers_have_one_order(
    tmp_path: Path,
) -> None:
    keys = Keys(prefix="talks", partitions=2)
    story = Script(name="story", turns=(Turn(says=Reply(text=WORDS), delivery=Delivery(pace=60)),))
    short = Script(name="short", turns=(Turn(says=Reply(text="All is well.")),) * 3)
    with sentinel_group(tmp_path, down_after_ms=5000) as group:
        async with (
            MockProvider([story, short]) as provider,
            fleet(tmp_path, group.url, keys, provider.url, PIPELINE),
            Client(group.url, prefix=keys.prefix, partitions=2) as client,
            AsyncExitStack() as reading,
        ):
            session = client.session("talk")
            await session.configure({"provider": "openai-chat", "model": "short"})
            live: list[SessionStep] = []

            async def read() -> None:
                async for step in session.follow():
                    live.append(step)  # noqa: PERF401 - what came so far is looked at meanwhile

            reading.push_async_callback(stop_task, asyncio.create_task(read()))

            def heard(kind: Any) -> list[Any]:
                return [step.event for step in live if isinstance(step.event, kind)]

            await session.send("tell", append="first", request={"model": "story"})
            await eventually(lambda: len(heard(Chunk)) > 8, timeout=60)
            await asyncio.to_thread(group.part)
            before = len(heard(Chunk))
            await session.send("and then?", append="lost")
            await eventually(
                lambda: any(event.append == "lost" for event in heard(Appended)) and len(heard(Chunk)) > before + 5,
                timeout=60,
            )
            await asyncio.to_thread(group.master.stop)
            await eventually(lambda: heard(RunEnded), timeout=60)
            assert await session.fate("lost") is None
            for append in ("kept", "lost"):
                await session.send("and then?", append=append, when_busy="enqueue")
            await eventually(lambda: len(heard(RunEnded)) == 3, timeout=60)
            later = [step async for step in session.follow(live=False)]
    assert [event.status for event in heard(RunEnded)] == ["incomplete", "completed", "completed"]
    told = [step.event for step in live]
    told.remove(next(event for event in heard(Appended) if event.append == "lost"))
    assert told == [step.event for step in later]


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
