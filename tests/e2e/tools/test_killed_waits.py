"""Workers are killed before, at and after a decision or an answer: a call runs once after an allow, and never after a
denial; a call that asked goes on with the answer, in a worker that did not ask.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import judge
from tests.e2e.conftest import Send
from tests.e2e.fleet import WITH_TOOLS, Fleet, Kind, are_away, ended, fleet, log_of
from tests.waiting import eventually
from tokenbus import Client
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.errors import AlreadyDecided
from tokenbus_services.mock_provider import MockProvider, Reply, Script, ToolCall, Turn

OLDER = Path(__file__).parents[2] / "services" / "tools" / "mcp" / "older_server.py"
SETTINGS = f"""
[stages]
lease_s = 1.0
[tools.noted]
kind = "python"
call = "tests.services.tools.sample_tools:noted"
parameters = {{ type = "object" }}
approval = "always"
[tools.book]
kind = "python"
call = "tests.services.tools.sample_tools:book"
parameters = {{ type = "object" }}
[tools.where]
kind = "client"
description = "Where the user is."
parameters = {{ type = "object" }}
timeout_s = 300
[mcp.older]
kind = "stdio"
command = "{sys.executable}"
args = ["{OLDER}", "choose"]
timeout_s = 300
"""
TASKS = Path(__file__).parents[2] / "services" / "tools" / "mcp" / "task_server.py"
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


async def freeze_owners(workers: Fleet) -> None:
    """So that nobody applies the next decisions, unless intake is in the process too."""
    for worker in workers.workers:
        if worker.kind in OWNERS and not worker.runs("fetcher") and worker.process.returncode is None:
            worker.freeze()


@pytest.mark.leaves_pending
@pytest.mark.parametrize("away", [False, True], ids=["in memory", "put away"])
async def test_a_decision_counts_once_whoever_is_killed(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path, *, away: bool
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

        if away:
            await eventually(lambda: are_away(server, keys, list(runs.values())), timeout=60)
        await replaced(workers)  # before any decision
        await decide("before")
        await ended(server.client, keys, [runs["before"]])
        await freeze_owners(workers)
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


@pytest.mark.leaves_pending
async def test_an_answer_counts_once_whoever_is_killed(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    notes.touch()
    words = ("before", "at", "after", "declined")

    def says(word: str) -> Script:
        call = ToolCall(name="book", arguments={"path": str(notes), "flight": word})
        return Script(name=word, turns=(Turn(says=Reply(tool_calls=(call,))), Turn(says=Reply(text="Done."))))

    async with (
        MockProvider([says(word) for word in words]) as provider,
        fleet(tmp_path, server_url, keys, provider.url, WITH_TOOLS, SETTINGS) as workers,
        Client(server_url, prefix=keys.prefix) as bus,
    ):
        runs = {word: await send(word, tools=[{"name": "book"}]) for word in words}

        async def asked(word: str, text: str) -> str:
            found: list[str] = []

            async def is_asked() -> bool:
                found[:] = [info.wait async for info in bus.waiting(run=runs[word]) if info.text == text]
                return len(found) == 1

            await eventually(is_asked, timeout=60)
            return found[0]

        seats = {word: await asked(word, f"Which seat on {word}?") for word in words}
        await replaced(workers)  # before any answer
        await bus.answer(runs["before"], seats["before"], {"seat": "1A"}, by="ann")
        sure = await asked("before", "Book 1A?")
        await replaced(workers)
        await bus.answer(runs["before"], sure, {"sure": True}, by="ann")
        await ended(server.client, keys, [runs["before"]])
        await freeze_owners(workers)
        await bus.answer(runs["at"], seats["at"], {"seat": "2A"}, by="ann")
        await bus.answer(runs["declined"], seats["declined"], decision="decline", by="ann")
        await replaced(workers)
        await bus.answer(runs["at"], await asked("at", "Book 2A?"), {"sure": True}, by="ann")
        await ended(server.client, keys, [runs["at"], runs["declined"]])
        await bus.answer(runs["after"], seats["after"], {"seat": "3A"}, by="ann")
        await bus.answer(runs["after"], await asked("after", "Book 3A?"), {"sure": True}, by="ann")
        await eventually(lambda: "after/3A" in notes.read_text(), timeout=60)
        await replaced(workers)
        logs: Any = await ended(server.client, keys, list(runs.values()))
        assert [info async for info in bus.waiting()] == []

    ran = notes.read_text().split()
    assert sorted(set(ran)) == ["after/3A", "at/2A", "before/1A"]
    assert ran.count("before/1A") == ran.count("at/2A") == 1
    for word, run in runs.items():
        log = logs[run]
        judge.check(log)
        asked_of = [event["wait"] for event in log if event["type"] == "waiting"]
        resumed = [(event["wait"], event["decision"], event["by"]) for event in log if event["type"] == "resumed"]
        decision = "decline" if word == "declined" else "accept"
        assert resumed == [(wait, decision, "ann") for wait in asked_of]
        assert len(asked_of) == (1 if word == "declined" else 2)
        (result,) = [e for e in log if e["type"] == "block_complete" and e["kind"] == "tool_result"]
        expected = {"before": "before/1A", "at": "at/2A", "after": "after/3A"}
        assert result["content"] == expected.get(word, "not booked: decline by ann over bus")
        assert log[-1]["type"] == "completed"


@pytest.mark.leaves_pending
async def test_a_result_of_the_client_counts_once_whoever_is_killed(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    asks = Reply(tool_calls=(ToolCall(name="where"),))
    script = Script(name="asks", turns=(Turn(says=asks), Turn(says=Reply(text="Done."))))
    words = ("before", "at", "after")
    async with (
        MockProvider([script]) as provider,
        fleet(tmp_path, server_url, keys, provider.url, WITH_TOOLS, SETTINGS) as workers,
        Client(server_url, prefix=keys.prefix) as bus,
    ):
        runs = {word: await send("asks", tools=[{"name": "where"}]) for word in words}
        await eventually(lambda: waits(server, keys, [*runs.values()]), timeout=60)
        found = {info.run: info.wait async for info in bus.waiting()}

        async def give(word: str) -> None:
            await bus.tool_result(runs[word], found[runs[word]], {"city": word}, by="ann")

        await replaced(workers)  # before any result
        await give("before")
        await ended(server.client, keys, [runs["before"]])
        await freeze_owners(workers)
        await give("at")
        await replaced(workers)
        await ended(server.client, keys, [runs["at"]])
        await give("after")
        await replaced(workers)
        logs: Any = await ended(server.client, keys, [*runs.values()])
        for run in runs.values():
            with pytest.raises(AlreadyDecided):
                await bus.tool_result(run, found[run], {"city": "elsewhere"}, by="bob")
        assert [info async for info in bus.waiting()] == []
    for word, run in runs.items():
        judge.check(logs[run])
        assert [(e["wait"], e["by"]) for e in logs[run] if e["type"] == "resumed"] == [(found[run], "ann")]
        (result,) = [e for e in logs[run] if e["type"] == "block_complete" and e["kind"] == "tool_result"]
        assert (result["content"], logs[run][-1]["type"]) == (f'{{"city":"{word}"}}', "completed")


@pytest.mark.leaves_pending
async def test_a_call_that_waits_in_its_worker_is_asked_for_once_and_gets_the_answer_in_the_next_worker(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    chooses = Reply(tool_calls=(ToolCall(name="older__choose"),))
    script = Script(name="chooses", turns=(Turn(says=chooses), Turn(says=Reply(text="Done."))))
    tool: dict[str, Any] = {"name": "older__choose", "parameters": {"type": "object"}}
    async with (
        MockProvider([script]) as provider,
        fleet(tmp_path, server_url, keys, provider.url, WITH_TOOLS, SETTINGS) as workers,
        Client(server_url, prefix=keys.prefix) as bus,
    ):
        found: dict[str, str] = {}

        async def asked_of() -> str:
            run = await send("chooses", tools=[tool])
            await eventually(lambda: waits(server, keys, [run]), timeout=60)
            found.update({info.run: info.wait async for info in bus.waiting(run=run)})
            return run

        before = await asked_of()
        await replaced(workers)
        await bus.answer(before, found[before], {"seat": "1A"}, by="ann")
        await ended(server.client, keys, [before])
        at = await asked_of()
        await freeze_owners(workers)
        await bus.answer(at, found[at], {"seat": "2A"}, by="ann")
        await replaced(workers)
        logs: Any = await ended(server.client, keys, [before, at])
        assert [info async for info in bus.waiting()] == []
    for run, seat in ((before, "1A"), (at, "2A")):
        judge.check(logs[run])
        asked = [event["wait"] for event in logs[run] if event["type"] == "waiting"]
        assert asked == [found[run]]
        assert [event["wait"] for event in logs[run] if event["type"] == "resumed"] == asked
        (result,) = [e for e in logs[run] if e["type"] == "block_complete" and e["kind"] == "tool_result"]
        assert result["content"] == f'{{"action": "accept", "content": {{"seat": "{seat}"}}}}'


@pytest.mark.leaves_pending
async def test_a_task_of_a_server_outlives_its_worker_and_ends_with_its_run(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / "notes"
    notes.touch()
    monkeypatch.setenv("NOTES", str(notes))
    settings = f"""
[stages]
lease_s = 1.0
[mcp.here]
kind = "stdio"
command = "{sys.executable}"
args = ["{TASKS}"]
env_pass = ["NOTES"]
timeout_s = 300
"""

    def lines() -> list[str]:
        return notes.read_text().splitlines()

    def says(word: str, tool: str = "report") -> Script:
        call = ToolCall(name=f"here__{tool}", arguments={"word": word})
        return Script(name=word, turns=(Turn(says=Reply(tool_calls=(call,))), Turn(says=Reply(text="Done."))))

    words = ("kept", "cancelled", "asks", "unanswered")
    kinds = dict(zip(words, ("report", "report", "book", "book"), strict=True))
    made = tuple(ToolCall(name=f"here__{tool}", arguments={"word": "overdue"}) for tool in ("report", "book"))
    both = Script(name="overdue", turns=(Turn(says=Reply(tool_calls=made)),))
    async with (
        MockProvider([*(says(word, kinds[word]) for word in words), both]) as provider,
        fleet(tmp_path, server_url, keys, provider.url, WITH_TOOLS, settings) as workers,
        Client(server_url, prefix=keys.prefix) as bus,
    ):
        tools = [{"name": "here__report"}, {"name": "here__book"}]
        runs = {word: await send(word, tools=tools) for word in words}
        await eventually(lambda: waits(server, keys, [runs[word] for word in words[2:]]), timeout=60)

        async def works(word: str) -> bool:
            return any(event["type"] == "tool_progress" for event in await log_of(server.client, keys, runs[word]))

        for word in ("kept", "cancelled"):
            await eventually(lambda word=word: works(word), timeout=60)
        await replaced(workers)
        asked = len(lines())
        await eventually(lambda: "asked" in lines()[asked:], timeout=60)
        await bus.cancel(runs["cancelled"], reason="enough")
        await eventually(lambda: "cancelled" in lines(), timeout=60)
        await bus.cancel(runs["unanswered"], reason="enough")
        await eventually(lambda: lines().count("cancelled") == 2, timeout=60)
        overdue = await send("overdue", tools=tools, deadline_s=10)
        await eventually(lambda: waits(server, keys, [overdue]), timeout=60)
        await eventually(lambda: lines().count("cancelled") == 4, timeout=60)  # one of them asks, and one works
        for text, seat in (("Which seat?", "12A"), ("Sure?", "yes")):

            async def is_asked(text: str = text) -> bool:
                return any([info.text == text async for info in bus.waiting(run=runs["asks"])])

            await eventually(is_asked, timeout=60)
            (info,) = [info async for info in bus.waiting(run=runs["asks"])]
            await bus.answer(info.run, info.wait, {"seat": seat}, by="ann")
        with notes.open("a") as file:
            file.write("go kept\n")
        logs: Any = await ended(server.client, keys, list(runs.values()))
    called = [line for line in lines() if line.startswith("called")]
    expected = [f"called {kinds[word]} {word}" for word in words]
    assert sorted(called) == sorted([*expected, "called book overdue", "called report overdue"]), "each once"
    for word, content in (("kept", "kept"), ("asks", "12A, accept")):
        judge.check(logs[runs[word]])
        (result,) = [e for e in logs[runs[word]] if e["type"] == "block_complete" and e["kind"] == "tool_result"]
        assert (result["content"], result.get("is_error")) == (content, None)
    assert [logs[runs[word]][-1]["type"] for word in ("cancelled", "unanswered")] == ["cancelled"] * 2
