"""Two workers of each stage, many runs, and every fault of a process: the logs equal undisturbed ones."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from tests.e2e import judge
from tests.e2e.conftest import WEATHER, Deploy, Send
from tests.e2e.fleet import WITH_TOOLS, Fleet, Worker, ended
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import TOKEN, TOOL_RESULT, Delivery, Reply, Script, ToolCall, Turn

RUNS = 25
DISTURBANCES = 5
"""`make chaos` disturbs as long as it is asked to."""
WORDS = " ".join(f"word{i}" for i in range(30))
TURNS = (
    Reply(
        thinking=f"I think of {TOKEN}. {WORDS}",
        text=f"Let me look, {TOKEN}. {WORDS}",
        tool_calls=(ToolCall(name="weather", arguments={"city": TOKEN}),),
    ),
    Reply(text=f"For {TOKEN} it says {TOOL_RESULT} {WORDS}"),
)


def undisturbed(token: str, tool_result: str) -> list[tuple[str, str]]:
    """The blocks of a run to which nothing happened."""
    first, last = (
        TURNS[0].with_marks_filled(token=token),
        TURNS[1].with_marks_filled(token=token, tool_results=(tool_result,)),
    )
    return [
        ("thinking", first.thinking),
        ("text", first.text),
        ("tool_call", first.tool_calls[0].raw),
        ("tool_result", tool_result),
        ("text", last.text),
    ]


@pytest.mark.leaves_pending  # a consumer that was killed keeps its name until a later worker sweeps it away
async def test_killed_and_frozen_workers_lose_double_and_reorder_nothing(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    seed = int(os.environ.get("TOKENBUS_SEED", random.randrange(10**6)))
    print(f"seed {seed} (TOKENBUS_SEED)")
    chance = random.Random(seed)
    script = Script(name="story", turns=tuple(Turn(says=reply, delivery=Delivery(pace=40)) for reply in TURNS))
    async with deployed([script], WITH_TOOLS * 2) as (_, running):
        runs: dict[str, str] = {}
        hurt = 0
        killed_fetchers = 0
        while hurt < DISTURBANCES:
            for _ in range(RUNS // DISTURBANCES):
                token = f"t{len(runs)}"
                api = chance.choice(["anthropic", "openai-chat"])
                runs[await send("story", token, provider=api, tools=[WEATHER])] = token
            await _progress(server, keys, list(runs), chance.randrange(50, 800))
            worker = chance.choice([w for w in running.workers if w.process.returncode is None])
            killed_fetchers += worker.runs("fetcher")
            await _hurt(worker, running, server, keys, chance)
            hurt += 1
        logs = await ended(server.client, keys, list(runs))
    incomplete = 0
    for run, token in runs.items():
        log: Any = logs[run]
        judge.check(log)
        end = log[-1]
        if end["type"] == "incomplete":
            incomplete += 1
            assert end["error"]["code"] == "worker_lost"
            assert judge.text(log), "only a run with visible text may end incomplete"
            continue
        assert end["type"] == "completed", end
        [result] = [content for kind, content in judge.blocks(log) if kind == "tool_result"]
        assert judge.blocks(log) == undisturbed(token, result)
        if not any(e["type"] in ("retrying", "restarted") for e in log):
            assert judge.text(log) == "".join(c for k, c in undisturbed(token, result) if k == "text")
    assert killed_fetchers or not incomplete
    print(f"{incomplete} of {len(runs)} runs incomplete after {killed_fetchers} fetchers hurt")


async def _progress(server: Server, keys: Keys, runs: list[str], events: int) -> None:
    """Wait until this many more public events are published or all runs ended: a moment independent of the clock."""

    async def written() -> int:
        return sum([await server.client.xlen(keys.log(run)) for run in runs])

    begin = await written()

    async def enough() -> bool:
        if await written() >= begin + events:
            return True
        return all([await server.client.hexists(keys.run(run), "result") for run in runs])

    await eventually(enough, timeout=60)


async def _hurt(worker: Worker, running: Fleet, server: Server, keys: Keys, chance: random.Random) -> None:
    if chance.random() < 0.5:
        worker.kill()
        await worker.process.wait()
        # An interpreter of its own: what follows in another one's steps may not rely on its order of strings in a set.
        await running.start(worker.kind, env={"PYTHONHASHSEED": "random"})
        return
    worker.freeze()
    await eventually(lambda: _replaced(worker, server, keys), timeout=60)
    worker.thaw()


async def _replaced(worker: Worker, server: Server, keys: Keys) -> bool:
    """Whether the others took over all that the frozen worker had: its leases, or the items it held."""
    name = f"-{worker.process.pid}-".encode()
    for stage in ("normalizer", "parser"):
        leases = [await server.client.hmget(keys.lease(p, stage), ["owner"]) for p in range(keys.partitions)]
        if any(owner and name in owner for [owner] in leases):
            return False
    if not (worker.runs("fetcher") or worker.runs("tools")):
        return True
    topic, group = ("turns", "fetcher") if worker.runs("fetcher") else ("tools", "tools")
    for partition in range(keys.partitions):
        for consumer in await server.client.xinfo_consumers(keys.topic(partition, topic), group):
            if name in consumer["name"] and consumer["pending"]:
                return False
    for consumer in await server.client.xinfo_consumers(keys.requests, "intake"):
        if name in consumer["name"] and consumer["pending"]:
            return False
    return True
