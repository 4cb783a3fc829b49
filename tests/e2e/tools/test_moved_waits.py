"""Runs that wait, put away or not, while the number of partitions changes, and while the server fails over: each goes
on, once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.e2e import judge
from tests.e2e.conftest import Send, sender
from tests.e2e.fleet import WITH_TOOLS, are_away, ended, fleet
from tests.servers import sentinel_group
from tests.services.cli.process import run as command
from tests.waiting import eventually
from tokenbus import Client, WaitInfo
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.errors import ServerError
from tokenbus.events.public import encode
from tokenbus_services.mock_provider import MockProvider, Reply, Script, ToolCall, Turn

RUNS = 8
SETTINGS = """
[stages]
lease_s = 1.0
[tools.noted]
kind = "python"
call = "tests.services.tools.sample_tools:noted"
parameters = { type = "object" }
approval = "always"
[tools.where]
kind = "client"
description = "Where the user is."
parameters = { type = "object" }
timeout_s = 300
"""
TOOLS = [{"name": "noted"}, {"name": "where"}]


def of_client(n: int) -> bool:
    """Whether the run with this number waits for a result of its client, not for leave."""
    return n % 4 == 3


def says(notes: Path, word: str) -> Script:
    call = ToolCall(name="noted", arguments={"path": str(notes), "word": word})
    if of_client(int(word[-1])):
        call = ToolCall(name="where")
    return Script(name=word, turns=(Turn(says=Reply(tool_calls=(call,))), Turn(says=Reply(text="Done."))))


async def waiting(bus: Client, runs: Sequence[str]) -> dict[str, WaitInfo]:
    """What these runs wait for, as the list of all has it."""
    return {info.run: info async for info in bus.waiting() if info.run in runs}


async def all_wait(bus: Client, runs: Sequence[str]) -> bool:
    try:
        return (await waiting(bus, runs)).keys() == set(runs)
    except ServerError:
        return False


async def decided(bus: Client, runs: Sequence[str]) -> None:
    """Every other one is allowed, and a client returns the result of every fourth."""
    found = await waiting(bus, runs)
    for n, run in enumerate(runs):
        if of_client(n):
            await bus.tool_result(run, found[run].wait, {"city": run}, by="ann")
            continue
        await (bus.deny(run, found[run].wait, by="ann") if n % 2 else bus.approve(run, found[run].wait, by="ann"))


def check(notes: Path, runs: Sequence[str], logs: Any) -> None:
    """Each that was allowed ran once, and the others never."""
    assert sorted(notes.read_text().split()) == sorted(run for n, run in enumerate(runs) if not n % 2)
    for n, run in enumerate(runs):
        judge.check(logs[run])
        (resumed,) = [event for event in logs[run] if event["type"] == "resumed"]
        decision = "result" if of_client(n) else "deny" if n % 2 else "allow"
        assert (resumed["decision"], logs[run][-1]["type"]) == (decision, "completed")
        (result,) = [e for e in logs[run] if e["type"] == "block_complete" and e["kind"] == "tool_result"]
        assert not of_client(n) or result["content"] == f'{{"city":"{run}"}}'


@pytest.mark.parametrize("away", [False, True], ids=["in memory", "put away"])
async def test_runs_that_wait_stay_where_they_are_while_the_partitions_change(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path, *, away: bool
) -> None:
    notes = tmp_path / "notes"
    notes.touch()
    before, after = [f"before{n}" for n in range(RUNS)], [f"after{n}" for n in range(RUNS)]
    runs = [*before, *after]
    async with (
        MockProvider([says(notes, run) for run in runs]) as provider,
        fleet(tmp_path, server_url, keys, provider.url, WITH_TOOLS, SETTINGS),
        Client(server_url, prefix=keys.prefix) as bus,
    ):
        for run in before:
            await send(run, id=run, tools=TOOLS)
        await eventually(lambda: all_wait(bus, before), timeout=60)
        if away:
            await eventually(lambda: are_away(server, keys, before), timeout=60)
        changed = await command("repartition", "11", TOKENBUS_CONFIG=str(tmp_path / "tokenbus.toml"))
        assert changed.code == 0, changed.error
        for run in after:
            await bus.publish({**_request(run), "id": run})
        async with Client(server_url, prefix=keys.prefix) as other:
            await eventually(lambda: all_wait(other, runs), timeout=60)
            await decided(other, runs)
            logs: Any = {run: await _log(other, run) for run in runs}
    check(notes, runs, logs)


async def _log(bus: Client, run: str) -> list[Any]:
    """The run's events up to its end, wherever it is."""
    return [msgspec.json.decode(encode(event)) async for event in bus.follow(run)]


def _request(run: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Go."}]
    return {"provider": "anthropic", "model": run, "messages": messages, "tools": TOOLS}


@pytest.mark.leaves_pending
@pytest.mark.parametrize("when", ["in memory", "put away", "put away, which is lost"])
async def test_runs_that_wait_are_decided_after_a_fail_over(tmp_path: Path, when: str) -> None:
    notes, keys = tmp_path / "notes", Keys(prefix="waits", partitions=4)
    notes.touch()
    runs = [f"run{n}" for n in range(RUNS)]
    with sentinel_group(tmp_path, down_after_ms=5000) as group:
        async with (
            MockProvider([says(notes, run) for run in runs]) as provider,
            fleet(tmp_path, group.url, keys, provider.url, WITH_TOOLS, SETTINGS),
            Server(group.url) as server,
            Client(group.url, prefix=keys.prefix) as bus,
        ):
            send = sender(server, keys)
            for run in runs:
                await send(run, id=run, tools=TOOLS)
            await eventually(lambda: all_wait(bus, runs), timeout=60)
            if when == "put away":
                await eventually(lambda: are_away(server, keys, runs), timeout=60)
            await server.client.set("waited-for", 1)
            assert await server.client.wait(1, 0) >= 1, "a replica has all of it"
            if "lost" in when:
                await asyncio.to_thread(group.part)
                await eventually(lambda: are_away(server, keys, runs), timeout=40)
            await asyncio.to_thread(group.master.stop)
            await eventually(lambda: all_wait(bus, runs), timeout=60)
            await decided(bus, runs)
            logs: Any = await ended(server.client, keys, runs)
    check(notes, runs, logs)
