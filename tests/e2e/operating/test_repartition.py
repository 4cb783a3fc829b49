"""`tokenbus repartition` on a fleet at work: runs that were open continue, new ones take the new number, all are
found."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any
from zlib import crc32

import httpx
import msgspec
import pytest

from tests.e2e import judge
from tests.e2e.conftest import WEATHER, Send
from tests.e2e.fleet import WITH_TOOLS, fleet
from tests.waiting import eventually
from tokenbus import BlockComplete, Chunk, Client, Response, TreeCursor, TreeStep
from tokenbus.bus import layout as repartition
from tokenbus.bus import scripts
from tokenbus.bus.keys import Keys
from tokenbus.bus.layout import join_deployment, learn
from tokenbus.bus.records import newest_records
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus.errors import RepartitionRefused
from tokenbus.testing import LocalBus
from tokenbus_services.gateway.budgets.spend import Spent, read_spend
from tokenbus_services.gateway.keys.key import new_key
from tokenbus_services.mock_provider import Delivery, MockProvider, Reply, Script, Stall, ToolCall, Turn

WORDS = " ".join(f"word{n}" for n in range(60))
EACH = 6


async def change(server: Server, keys: Keys, number: int) -> None:
    await repartition.announce(server, keys, await repartition.layout(server, keys), number)
    now = await repartition.layout(server, keys)

    async def ready() -> bool:
        return not await repartition.lagging(server, keys, now)

    await eventually(ready, timeout=60)
    await repartition.place(server, keys, now)


async def fenced(server: Server, keys: Keys) -> bool:
    """Whether no run is left that an earlier number placed."""
    epoch = str((await repartition.layout(server, keys)).epoch).encode()
    return await server.client.hget(keys.lease(0, "parser"), "epoch") == epoch


async def test_runs_before_during_and_after_a_change_end_normally(
    server: Server, server_url: str, send: Send, keys: Keys, tmp_path: Path
) -> None:
    call = ToolCall(name="weather", arguments={"city": "Oslo"})
    script = Script(
        name="story",
        turns=(
            Turn(says=Reply(text=WORDS, tool_calls=(call,)), delivery=Delivery(pace=60)),
            Turn(says=Reply(text=WORDS), delivery=Delivery(pace=120)),
        ),
    )
    runs: list[str] = []
    seen: dict[str, list[int]] = {}
    shared: Counter[tuple[str, int]] = Counter()

    async def note(event: BlockComplete) -> None:
        seen.setdefault(event.run, []).append(event.seq)

    async def note_shared(event: BlockComplete) -> None:
        shared[(event.run, event.seq)] += 1

    async with (
        MockProvider([script]) as provider,
        fleet(tmp_path, server_url, keys, provider.url, WITH_TOOLS) as running,
        Client(server_url, prefix=keys.prefix) as bus,
    ):
        alone, group = (
            bus.subscribe("blocks", kinds=BlockComplete),
            bus.subscribe("blocks", kinds=BlockComplete, group="app"),
        )
        async with alone, group:
            reading = [asyncio.create_task(alone.each(note)), asyncio.create_task(group.each(note_shared))]

            async def publish() -> None:
                for _ in range(EACH):
                    run = await send("story", tools=[WEATHER])
                    runs.append(run)

            for number in (7, 3):  # neither divides the other
                await publish()
                _, _ = await asyncio.gather(change(server, keys, number), publish())
                if number == 3:
                    parser = running.worker_of("parser")
                    if parser.runs("fetcher"):
                        await parser.stop()  # if it were killed, its provider calls would be lost
                    else:
                        parser.kill()
                    await running.start(parser.kind)  # this one starts with the old number in its settings
            await eventually(
                lambda: fenced(server, keys), timeout=60
            )  # from here on no run is placed by an earlier number
            await publish()
            results = await asyncio.gather(*(bus.result(run) for run in runs))
            now = await repartition.layout(server, keys)
            assert (now.placing, now.spread) == (3, 7)
            assert await repartition.runs_elsewhere(server, keys, now) > 0
            all_received = lambda: set(seen) == set(runs) == {run for run, _ in shared}  # noqa: E731
            await eventually(all_received, timeout=60)
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)

        assert [result.status for result in results] == ["completed"] * len(runs)
        assert all(seqs == sorted(set(seqs)) for seqs in seen.values()), "in order, none twice"
        async with Client(server_url, prefix=keys.prefix, partitions=keys.partitions) as follower:  # the old number
            for run in runs:
                judge.check([msgspec.to_builtins(event) async for event in follower.follow(run)])
        there: list[Any] = [key async for key in server.client.scan_iter(match=f"{keys.prefix}:*:run:*")]
        placed = {run: int(place.partition("{")[2]) for place, run in (key.decode().split("}:run:") for key in there)}
        names = Counter(key.decode().partition(":run:")[2] for key in there)
        assert names == Counter(runs), "no run is in two partitions"
        assert all(placed[run] == crc32(run.encode()) % 3 for run in runs[-EACH:])
        assert await running.doctor()


async def test_the_change_is_refused_unless_every_worker_and_gateway_reports_both_numbers(
    server: Server, keys: Keys
) -> None:
    await join_deployment(server, keys)
    await server.client.zadd(keys.members("parser"), {"old-release": server.clock.now_ms()})
    await repartition.announce(server, keys, await repartition.layout(server, keys), 8)
    now = await repartition.layout(server, keys)
    await run_script(server, scripts.present(keys.gateway_members, member="old-gateway", ttl_ms=60_000))
    assert await repartition.lagging(server, keys, now) == ["old-gateway", "old-release"]
    with pytest.raises(RepartitionRefused, match="under way"):
        await repartition.announce(server, keys, now, 5)
    await repartition.give_up(server, keys, now)
    now = await repartition.layout(server, keys)
    assert (now.placing, now.announced) == (keys.partitions, None)
    await learn(server, keys)
    assert keys.partition_of("r") == crc32(b"r") % 4


OPS, ADA = new_key(), new_key()
EVERYTHING = f"""
[records]
sample = 1.0
[policies.talk]
use = "tests.e2e.policies.guards:Replace"
[policies.talk.options]
word = "swordfish"
by = "*"
[[policy_routes]]
policies = ["talk"]
[gateway]
[gateway.prices."anthropic/"]
input = 1
output = 1
[gateway.keys.ada]
sha256 = "{ADA.sha256}"
tenant = "ada"
[gateway.keys.ops]
sha256 = "{OPS.sha256}"
operator = true
"""


class Clients:
    """A client and an operator of the gateway, and the lines of the streams that they read."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self.ada, self.ops = ({"authorization": f"Bearer {key.text}"} for key in (ADA, OPS))
        self._lines: dict[str, list[str]] = {}

    async def read(self, path: str, headers: dict[str, str]) -> None:
        lines = self._lines.setdefault(path, [])
        async with self._http.stream("GET", path, headers=headers) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                lines.append(line)

    def events(self, path: str) -> list[dict[str, Any]]:
        """What came on a stream until now."""
        lines = self._lines.get(path, [])
        return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]

    async def publish(self, model: str, run: str) -> str:
        body = {"id": run, "model": f"anthropic/{model}", "messages": [{"role": "user", "content": run}]}
        answer = await self._http.post("/runs", json=body, headers=self.ada)
        assert answer.status_code == 202, answer.text
        return answer.json()["run"]

    async def text(self, run: str) -> str:
        return (await self._http.get(f"/runs/{run}", headers=self.ada)).json()["text"]

    async def listed(self, headers: dict[str, str], query: str = "") -> list[str]:
        """The runs of the list, page by page."""
        found, after = list[str](), ""
        while True:
            page = (await self._http.get(f"/runs?limit=3{query}{after}", headers=headers)).json()
            found += [info["run"] for info in page["runs"]]
            if not page.get("next"):
                return sorted(found)
            after = f"&after={page['next']}"


async def check_spend_and_records(server: Server, keys: Keys, results: list[Response]) -> None:
    """Each run is recorded, and counted once."""
    used = [result.usage for result in results if result.usage]
    given, output_tokens = sum(usage.input or 0 for usage in used), sum(usage.output or 0 for usage in used)

    async def total() -> Spent:
        return (await read_spend(server, keys, ["ada"]))[0].total

    async def counted() -> bool:
        return (await total()).runs >= len(results)

    async def recorded() -> bool:
        return {entry.run async for entry in newest_records(server, keys)} == {result.run for result in results}

    await eventually(counted, timeout=60)
    await eventually(recorded, timeout=60)
    spent = await total()
    assert (spent.runs, spent.input, spent.output) == (len(results), given, output_tokens)


async def test_readers_of_the_gateway_policies_records_and_the_spend_continue_during_a_change() -> None:
    text = "The swordfish swims on. " * 8
    received = text.replace("swordfish", "*")
    keys = Keys()
    topic, following = "/topics/visible?from=start", "/runs/slow/events"
    with LocalBus(EVERYTHING) as local:
        local.model_says("slow", Turn(says=Reply(text=text), fault=Stall(after_text="swims")))
        local.model_says("quick", Reply(text=text))
        async with (
            httpx.AsyncClient(base_url=local.gateway, timeout=120) as http,
            Server(local.url) as server,
            asyncio.TaskGroup() as readers,
        ):
            clients = Clients(http)
            listening = readers.create_task(clients.read(topic, clients.ops))
            runs = [await clients.publish("slow", "slow")]
            readers.create_task(clients.read(following, clients.ada))
            await eventually(lambda: local.exchanges and local.exchanges[0].state == "stalled", timeout=60)
            await eventually(lambda: clients.events(following), timeout=60)
            await change(server, keys, 13)
            await eventually(lambda: fenced(server, keys), timeout=60)
            names = [f"later-{n}{runs[0].removeprefix('slow')}" for n in range(60)]  # the ids are the tenant's
            moved = [name for name in names if crc32(name.encode()) % 13 >= 8][:6]
            runs += [await clients.publish("quick", run) for run in moved]
            local.resume(local.exchanges[0])
            async with Client(local.url) as bus:
                results = list(await asyncio.gather(*(bus.result(run) for run in runs)))
                logs = {run: [event async for event in bus.follow(run)] for run in runs}
            assert [(result.status, result.text) for result in results] == [("completed", received)] * len(runs)
            for run in moved:
                assert await server.client.exists(Keys(partitions=13).run(run)), "placed by the new number"

            await eventually(lambda: [e["seq"] for e in clients.events(following)] == [e.seq for e in logs[runs[0]]])
            visible = {run: [e.seq for e in logs[run] if isinstance(e, Chunk) and e.visible] for run in runs}

            def seqs_by_run() -> dict[str, list[int]]:
                events = clients.events(topic)
                return {run: [event["seq"] for event in events if event["run"] == run] for run in runs}

            await eventually(
                lambda: sum(map(len, seqs_by_run().values())) >= sum(map(len, visible.values())), timeout=60
            )
            assert seqs_by_run() == visible, "without a gap, none twice"
            listening.cancel()
            assert [await clients.text(run) for run in runs] == [received] * len(runs)
            assert await clients.listed(clients.ada) == sorted(runs)
            assert await clients.listed(clients.ops, "&tenant=ada") == sorted(runs)
            await check_spend_and_records(server, keys, results)


async def test_a_tree_stays_whole_and_in_one_order_while_the_number_of_partitions_changes(
    server: Server, server_url: str, send: Send, keys: Keys, tmp_path: Path
) -> None:
    call = ToolCall(name="helper", arguments={"task": "go"})
    asks = Script(name="asks", turns=(Turn(says=Reply(tool_calls=(call, call))), Turn(says=Reply(text=WORDS))))
    helper = Script(name="helper", turns=(Turn(says=Reply(text=WORDS), fault=Stall(after_events=4)),), repeat_last=True)
    tool = '[tools.helper]\nkind = "run"\nprovider = "anthropic"\nmodel = "helper"\n'
    async with (
        MockProvider([asks, helper]) as provider,
        fleet(tmp_path, server_url, keys, provider.url, WITH_TOOLS, tool) as running,
        Client(server_url, prefix=keys.prefix) as bus,
    ):
        assert running.workers
        runs = [await send("asks", tools=[{"name": "helper"}]) for _ in range(4)]
        live = [asyncio.create_task(tree_of(bus, run)) for run in runs]
        stalled = lambda: [each for each in provider.requests if each.state == "stalled"]  # noqa: E731
        await eventually(lambda: len(stalled()) == 2 * len(runs), timeout=60)
        await change(server, keys, 3)
        for each in stalled():
            provider.resume(each)
        trees = await asyncio.gather(*live)
        for run, steps in zip(runs, trees, strict=True):
            assert {step.event.run for step in steps} == {run, f"{run}~0", f"{run}~1"}
            assert await tree_of(bus, run) == steps
            middle = len(steps) // 2
            assert await tree_of(bus, run, steps[middle].cursor) == steps[middle + 1 :]
            for member in {step.event.run for step in steps}:
                log = [step.event for step in steps if step.event.run == member]
                assert log == [event async for event in bus.follow(member)]
                judge.check([msgspec.to_builtins(event) for event in log])


async def tree_of(bus: Client, run: str, after: TreeCursor | None = None) -> list[TreeStep]:
    return [step async for step in bus.follow_tree(run, after=after)]
