"""Workers whose hosts' clocks are minutes apart: deadlines, tools and retries take the time that they should."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tests.e2e import judge
from tests.e2e.conftest import Send
from tests.e2e.fleet import Fleet, Kind, ended
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import Delivery, MockProvider, Reply, Script, Status, ToolCall, Turn

AHEAD_S: dict[Kind, int] = {"fetcher": -300, "normalizer": 100, "parser": 200, "tools": 600}
"""A tool's call that is open for 30 s and `limits.tool_slack_s` counts as lost: 150 s."""
DEADLINE_S = 3.0
TOOL = """
import asyncio

async def slow() -> str:
    await asyncio.sleep(1)  # long enough for several looks of the parser's clock
    return "here it is"
"""
SHIFT = """
import time
from pathlib import Path

Path(__file__).with_name("in-use").touch()

def shifted(clock, ahead):
    return lambda: clock() + ahead

time.time = shifted(time.time, {ahead})
time.time_ns = shifted(time.time_ns, {ahead} * 10**9)
"""
TOML = """
[retry]
base_delay_s = 0.2
[tools.slow]
kind = "python"
call = "slow_tools:slow"
"""
SCRIPTS = [
    Script(
        name="calls",
        turns=(Turn(says=Reply(tool_calls=(ToolCall(name="slow", arguments={}),))), Turn(says=Reply(text="done"))),
    ),
    Script(name="again", turns=(Turn(says=Reply(text="done"), first=(Status(status=503),)),)),
    Script(name="silent", turns=(Turn(says=Reply(text="late"), delivery=Delivery(delay_s=300)),)),
]


async def test_workers_with_clocks_minutes_apart_answer_no_tool_and_end_no_run_before_its_time(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    (tmp_path / "slow_tools.py").write_text(TOOL)
    async with MockProvider(SCRIPTS) as provider:
        running = Fleet(tmp_path, server_url, keys, provider.url, TOML)
        try:
            for kind, ahead in AHEAD_S.items():
                shift = tmp_path / f"ahead{ahead}"
                shift.mkdir()
                (shift / "sitecustomize.py").write_text(SHIFT.format(ahead=ahead))
                await running.start(kind, env={"PYTHONPATH": str(shift)})
            began = time.monotonic()
            silent = await send("silent", deadline_s=DEADLINE_S)
            tool = {"name": "slow", "parameters": {"type": "object"}}
            calls = await send("calls", tools=[tool], deadline_s=250)
            again = await send("again", deadline_s=250)
            logs: Any = await ended(server.client, keys, [silent])
            took = time.monotonic() - began
            logs |= await ended(server.client, keys, [calls, again])
        finally:
            await running.stop()
    assert all((tmp_path / f"ahead{ahead}" / "in-use").exists() for ahead in AHEAD_S.values())
    for log in logs.values():
        judge.check(log)
    assert logs[silent][-1]["error"]["code"] == "deadline"
    assert DEADLINE_S * 0.9 < took < 60
    assert logs[calls][-1]["type"] == "completed", logs[calls][-1]
    assert [content for kind, content in judge.blocks(logs[calls]) if kind == "tool_result"] == ["here it is"]
    assert logs[again][-1]["type"] == "completed", logs[again][-1]
    for log in logs.values():
        timing = log[-1]["timing"]
        assert all(0 <= ms < 60_000 for ms in timing.values() if ms is not None), timing
