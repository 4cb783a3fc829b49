"""Workers are killed before, at and after a decision: a call runs once after an allow, and never after a denial."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import judge
from tests.e2e.conftest import Send
from tests.e2e.fleet import WITH_TOOLS, Fleet, Kind, ended, fleet, log_of
from tests.waiting import eventually
from tokenbus import Client
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import MockProvider, Reply, Script, ToolCall, Turn

SETTINGS = """
[stages]
lease_s = 1.0
[tools.noted]
kind = "python"
call = "tests.services.tools.sample_tools:noted"
parameters = { type = "object" }
approval = "always"
"""
OWNERS: tuple[Kind, ...] = tuple(kind for kind in WITH_TOOLS if kind not in {"fetcher", "normalizer"})
"""Who has a run that waits: the parser; and who would run its call."""


async def replaced(workers: Fleet) -> None:
    """Kill all of them at once, and start others."""
    for worker in workers.workers:
        if worker.kind in OWNERS and worker.process.returncode is None:
            worker.kill()
    await workers.start(*OWNERS)


async def waits(server: Server, keys: Keys, runs: Sequence[str]) -> bool:
    logs = [await log_of(server.client, keys, run) for run in runs]
    return all(any(event["type"] == "waiting" for event in log) for log in logs)


@pytest.mark.leaves_pending
async def test_a_decision_counts_once_whoever_is_killed(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    notes.touch()

    def says(word: str) -> Script:
        call = ToolCall(name="noted", arguments={"path": str(notes), "word": word})
        return Script(name=word, turns=(Turn(says=Reply(tool_calls=(call,))), Turn(says=Reply(text="Done."))))

    words = ("before", "at", "after", "denied")
    async with (
        MockProvider([says(word) for word in words]) as provider,
        fleet(tmp_path, server_url, keys, provider.url, WITH_TOOLS, SETTINGS) as workers,
        Client(server_url, prefix=keys.prefix) as bus,
    ):
        runs = {word: await send(word, tools=[{"name": "noted"}]) for word in words}
        await eventually(lambda: waits(server, keys, list(runs.values())), timeout=60)
        found = {info.run: info.wait async for info in bus.waiting()}
        assert set(found) == set(runs.values())

        async def decide(word: str, *, allow: bool = True) -> None:
            run = runs[word]
            await (bus.approve(run, found[run], by="ann") if allow else bus.deny(run, found[run], "no", by="ann"))

        await replaced(workers)  # before any decision
        await decide("before")
        await ended(server.client, keys, [runs["before"]])
        for worker in workers.workers:  # so that nobody applies the next decisions, unless intake is in the process too
            if worker.kind in OWNERS and not worker.runs("fetcher") and worker.process.returncode is None:
                worker.freeze()
        await decide("at")
        await decide("denied", allow=False)
        await replaced(workers)
        await ended(server.client, keys, [runs["at"], runs["denied"]])
        await decide("after")
        await eventually(lambda: "after" in notes.read_text(), timeout=60)
        await replaced(workers)
        logs: Any = await ended(server.client, keys, list(runs.values()))
        assert [info async for info in bus.waiting()] == []

    ran = notes.read_text().split()
    assert sorted(set(ran)) == ["after", "at", "before"]
    assert ran.count("before") == ran.count("at") == 1
    for word, run in runs.items():
        log = logs[run]
        judge.check(log)
        (resumed,) = [event for event in log if event["type"] == "resumed"]
        assert (resumed["decision"], resumed["by"], resumed["door"]) == (
            "deny" if word == "denied" else "allow",
            "ann",
            "bus",
        )
        (result,) = [e for e in log if e["type"] == "block_complete" and e["kind"] == "tool_result"]
        assert result["content"] == ("the call was denied, and did not run: no" if word == "denied" else word)
        assert log[-1]["type"] == "completed"
