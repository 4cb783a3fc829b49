"""Workers are killed before a child run is published, while it runs, and when it has ended: it runs once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e import judge
from tests.e2e.conftest import Send
from tests.e2e.fleet import PIPELINE, WITH_TOOLS, Kind, are_away, ended, fleet, log_of
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.gateway.budgets.spend import read_spend
from tokenbus_services.gateway.keys.key import new_key
from tokenbus_services.mock_provider import MockProvider, Reply, Script, Stall, ToolCall, Turn

SETTINGS = f"""
[gateway]
tools = ["helper"]
[gateway.prices."anthropic/"]
input = 0
output = 1000
[gateway.keys.pays]
sha256 = "{new_key().sha256}"
max_budget = 100
[stages]
lease_s = 1.0
[tools.helper]
kind = "run"
provider = "anthropic"
model = "helper"
"""
SILENT = """
[limits]
silent_run_s = 0.5
"""
OWNERS: tuple[Kind, ...] = tuple(kind for kind in WITH_TOOLS if kind not in {"fetcher", "normalizer", "pipeline"})
"""Who begins children and hears of their end. A process that also calls the provider would lose the child's attempt."""


def asks(word: str) -> Script:
    call = ToolCall(name="helper", arguments={"task": word})
    return Script(name=word, turns=(Turn(says=Reply(tool_calls=(call, call))), Turn(says=Reply(text="Done."))))


@pytest.mark.leaves_pending
@pytest.mark.parametrize("away", [False, True], ids=["in memory", "put away"])
async def test_a_child_runs_once_whoever_is_killed(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path, *, away: bool
) -> None:
    helper = Script(name="helper", turns=(Turn(says=Reply(text="Here it is, all."), fault=Stall(after_text="Here")),))
    words = ("first", "second")
    async with (
        MockProvider([helper, *map(asks, words)]) as provider,
        fleet(tmp_path, server_url, keys, provider.url, WITH_TOOLS, SETTINGS) as workers,
    ):

        def live(*kinds: Kind) -> list[Any]:
            return [w for w in workers.workers if w.kind in kinds and w.process.returncode is None]

        async def replaced() -> None:
            for worker in live(*OWNERS):
                worker.kill()
            await workers.start(*OWNERS)

        async def in_all(runs: list[str], kind: str) -> bool:
            logs = [await log_of(server.client, keys, run) for run in runs]
            return all(any(event["type"] == kind for event in log) for log in logs)

        async def held() -> set[str]:
            """The runs for which the key's budget holds something."""
            return {run.decode() for run in await server.client.hkeys(keys.gateway_held("pays"))} - {""}

        for worker in live("tools"):  # the calls are handed out, and nobody begins their runs
            worker.freeze()
        of_key = {"gateway": {"key": "pays"}}
        runs = [await send(word, tools=[{"name": "helper"}], metadata=of_key) for word in words]
        children = [f"{run}~{block}" for run in runs for block in (0, 1)]
        await eventually(lambda: in_all(runs, "child_started"), timeout=60)
        assert not any([await server.client.exists(keys.run(child)) for child in children])
        await replaced()
        await eventually(lambda: in_all(children, "chunk"), timeout=60)
        if away:
            await eventually(lambda: are_away(server, keys, runs), timeout=60)
        await replaced()  # while they run
        assert await held() == {*children}
        for worker in live("tools"):  # so that nobody hears of their end
            worker.freeze()
        for exchange in provider.requests:
            if exchange.state == "stalled":
                provider.resume(exchange)
        inner: Any = await ended(server.client, keys, children)
        await replaced()
        logs: Any = await ended(server.client, keys, runs)
        await workers.start("gateway")

        async def settled() -> bool:
            (spend,) = await read_spend(server, keys, ["pays"])
            return spend.total.runs == len(runs) + len(children) and spend.reserved == 0

        await eventually(settled, timeout=60)
        assert await held() == set()
        trees = {run: await server.client.xrange(keys.tree(run)) for run in runs}
        known = [key.decode() async for key in server.client.scan_iter(match=f"{keys.prefix}:*:run:*")]

    assert sorted(name.rpartition(":")[2] for name in known) == sorted([*runs, *children])
    for child in children:
        judge.check(inner[child])
        assert [event["type"] for event in inner[child]].count("started") == 1
    for run in runs:
        judge.check(logs[run])
        order = [(name.decode(), value.decode()) for _, fields in trees[run] for name, value in fields.items()]
        judge.check_tree(order, {run: logs[run], **{child: inner[child] for child in (f"{run}~0", f"{run}~1")}})
        results = [e["content"] for e in logs[run] if e["type"] == "block_complete" and e["kind"] == "tool_result"]
        assert results == ["Here it is, all."] * 2
        assert [e["child"] for e in logs[run] if e["type"] == "child_ended"] == [f"{run}~0", f"{run}~1"]
        assert logs[run][-1]["type"] == "completed"


async def test_a_call_that_no_queue_has_begins_its_child_again(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    async with (
        MockProvider([Script(name="helper", turns=(Turn(says=Reply(text="Here.")),)), asks("lost")]) as provider,
        fleet(tmp_path, server_url, keys, provider.url, PIPELINE, SETTINGS + SILENT) as workers,
    ):

        async def lose(count: int) -> None:
            """Delete the queue's entries once it has so many."""
            queue = keys.topic(keys.partition_of(run), "tools")

            async def are_there() -> bool:
                return await server.client.xlen(queue) == count

            await eventually(are_there, timeout=60)
            await server.client.xtrim(queue, maxlen=0, approximate=False)

        run = await send("lost", tools=[{"name": "helper"}])
        await lose(2)
        (tools,) = await workers.start("tools")
        children = [f"{run}~{block}" for block in (0, 1)]

        async def began() -> bool:
            return all([await server.client.exists(keys.run(child)) for child in children])

        await eventually(began, timeout=60)
        logs: Any = await ended(server.client, keys, [*children, run])
        assert tools.process.returncode is None
    results = [e["content"] for e in logs[run] if e["type"] == "block_complete" and e["kind"] == "tool_result"]
    assert results == ["Here.", "Here."]
    for each in (run, *children):
        judge.check(logs[each])
