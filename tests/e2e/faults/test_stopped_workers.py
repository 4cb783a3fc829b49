"""Workers that stood for a time (SIGSTOP and SIGCONT): what they waited for meanwhile is not to blame.

`TOKENBUS_STOOD_S=105` lets a parser stand for that long, and the others for 30 s: without any policy worker for
`limits.policy_slack_s` and the policies' timeouts, or any fetcher for much longer, a run ends, as it should.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import WEATHER, Send, sender
from tests.e2e.faults.test_every_await import POLICY, WITH_CALL
from tests.e2e.fleet import PIPELINE, WITH_TOOLS, Kind, ended, fleet, provider_table
from tests.e2e.judge import blocks, check
from tests.e2e.policies.test_policy_stage import TALK, decisions_of, policy
from tests.servers import binary
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import TOOL_RESULT, MockProvider, Reply, Script, Stall, ToolCall, Turn
from tokenbus_services.process.embedded_server import EmbeddedServer

KINDS: tuple[Kind, ...] = (*WITH_TOOLS, "policy")
STOOD_S = float(os.environ.get("TOKENBUS_STOOD_S", "9"))
"""More than all timeouts that a policy has in these tests."""
SLOW_ANSWERS = 10
"""Enough for several steps of each task, each of which may need more than one answer."""

STALLS = Script(name="stalls", turns=(Turn(says=Reply(text="one two three four"), fault=Stall(after_text="three")),))


GATED = f"""
[tools.gated]
kind = "python"
call = "{__name__}:gated"
timeout_s = 3.0
"""


async def gated(gate: str) -> str:
    """A tool: answer once the file exists."""
    path = Path(gate)
    path.with_suffix(".began").touch()
    await eventually(path.exists)
    return "it is open"


async def passed(server: Server, seconds: float) -> None:
    """Wait until this time has passed on the server."""
    began, _ = await server.client.time()

    async def is_over() -> bool:
        now, _ = await server.client.time()
        return now > began + seconds

    await eventually(is_over, timeout=60 + seconds)


async def test_a_fetcher_that_stood_reports_no_silence_of_its_providers(
    server: Server, server_url: str, keys: Keys, tmp_path: Path, send: Send
) -> None:
    async with MockProvider([STALLS]) as provider:
        brief = provider_table("brief", "anthropic", provider.url, "idle_timeout_s = 3.0\nprogress_timeout_s = 4.0")
        async with fleet(tmp_path, server_url, keys, provider.url, PIPELINE, brief) as running:
            runs = [await send("stalls", provider="brief") for _ in range(3)]
            await provider.until(lambda: [each.state for each in provider.requests] == ["stalled"] * 3)
            fetcher = running.worker_of("fetcher")
            fetcher.freeze()
            await passed(server, min(STOOD_S, 30.0))
            fetcher.thaw()
            for exchange in provider.requests:
                provider.resume(exchange)
            logs: Any = await ended(server.client, keys, runs)
        for run in runs:
            check(logs[run])
            assert logs[run][-1]["type"] == "completed", logs[run][-1]
            assert {event["attempt"] for event in logs[run]} == {1}
        assert len(provider.requests) == 3


async def test_a_tool_worker_that_stood_reports_no_timeout_of_a_tool_that_answers(
    server: Server, server_url: str, keys: Keys, tmp_path: Path, send: Send
) -> None:
    """The tool answers in its executor while the worker is stopped, which is for twice the tool's timeout."""
    gate = tmp_path / "gate"
    script = Script(
        name="gated",
        turns=(
            Turn(says=Reply(text="", tool_calls=(ToolCall(name="gated", arguments={"gate": str(gate)}),))),
            Turn(says=Reply(text=f"It says {TOOL_RESULT}.")),
        ),
    )
    tool = {"name": "gated", "parameters": {"type": "object", "properties": {"gate": {"type": "string"}}}}
    async with (
        MockProvider([script]) as provider,
        fleet(tmp_path, server_url, keys, provider.url, WITH_TOOLS, GATED) as running,
    ):
        run = await send("gated", tools=[tool])
        await eventually(gate.with_suffix(".began").exists)
        worker = running.worker_of("tools")
        worker.freeze()
        gate.touch()
        await passed(server, min(STOOD_S, 30.0))
        worker.thaw()
        logs: Any = await ended(server.client, keys, [run])
    check(logs[run])
    assert [whole for kind, whole in blocks(logs[run]) if kind == "tool_result"] == ["it is open"]


@pytest.mark.parametrize("executors", [0, 1])
async def test_a_policy_worker_that_stood_blames_no_policy(
    executors: int, server: Server, server_url: str, keys: Keys, tmp_path: Path, send: Send
) -> None:
    """It stands for at least three times the policy's timeout, and so much longer than its leases."""
    toml = f"[limits]\npolicy_executors = {executors}\n" + policy("slow", "Slow", "timeout_s = 3.0")
    async with (
        MockProvider([TALK]) as provider,
        fleet(tmp_path, server_url, keys, provider.url, PIPELINE, toml) as running,
    ):
        (worker,) = await running.start("policy", env={"MARKS": str(tmp_path)})
        run = await send("talk", policies=["slow"])
        await eventually((tmp_path / "calls").exists)
        worker.freeze()
        (tmp_path / "go").touch()
        await passed(server, min(STOOD_S, 30.0))
        worker.thaw()
        logs: Any = await ended(server.client, keys, [run])
    check(logs[run])
    assert logs[run][-1]["type"] == "completed", logs[run][-1]
    assert [d["action"] for d in await decisions_of(server, keys, run) if d["action"] == "error"] == []


async def test_a_parser_that_stood_blames_no_policy_that_judged_meanwhile(
    server: Server, server_url: str, keys: Keys, tmp_path: Path, send: Send
) -> None:
    """The policy may take 5 s in all. It judges while the parser, which watches that time, is stopped for longer."""
    toml = "[limits]\npolicy_slack_s = 2.0\n" + policy("slow", "Slow", "timeout_s = 3.0")
    async with (
        MockProvider([TALK]) as provider,
        fleet(tmp_path, server_url, keys, provider.url, PIPELINE, toml) as running,
    ):
        await running.start("policy", env={"MARKS": str(tmp_path)})
        run = await send("talk", policies=["slow"])
        await eventually((tmp_path / "calls").exists)
        parser = running.worker_of("parser")
        parser.freeze()
        (tmp_path / "go").touch()
        await passed(server, STOOD_S)
        parser.thaw()
        logs: Any = await ended(server.client, keys, [run])
    check(logs[run])
    assert logs[run][-1]["type"] == "completed", logs[run][-1]
    assert {event["attempt"] for event in logs[run]} == {1}


async def test_a_server_whose_answers_take_seconds_kills_no_worker(tmp_path: Path) -> None:
    """Each round trip takes 3.4 s, which is less than the time limit of a command."""
    keys = Keys(prefix="slow", partitions=2)
    with EmbeddedServer(tmp_path / "data", binary=binary()) as process:
        async with (
            MockProvider([WITH_CALL]) as provider,
            fleet(tmp_path, process.url, keys, provider.url, KINDS, POLICY) as running,
            Server(process.url) as server,
        ):
            send = sender(server, keys)
            before = [await send("call", tools=[WEATHER], policies=["nothing"]) for _ in range(3)]
            for _ in range(SLOW_ANSWERS):
                await server.client.execute_command("CLIENT", "PAUSE", 3400, "ALL")
                await server.client.ping()  # answered after the pause, with all that waited for it
            after = [await send("call", tools=[WEATHER], policies=["nothing"]) for _ in range(3)]
            logs: Any = await ended(server.client, keys, [*before, *after])
            assert [worker.process.returncode for worker in running.workers] == [None] * len(running.workers)
    for log in logs.values():
        check(log)
        assert log[-1]["type"] == "completed", log[-1]
