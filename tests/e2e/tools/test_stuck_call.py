"""A defect in a tool worker: the work on a call waits for what never comes, and no timeout of the call ends it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.e2e.conftest import WEATHER, Send
from tests.e2e.fleet import Fleet, ended
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import TOOL_RESULT, MockProvider, Reply, Script, ToolCall, Turn


def calls(name: str, city: str) -> Script:
    call = ToolCall(name="weather", arguments={"city": city})
    return Script(
        name=name,
        turns=(Turn(says=Reply(text="", tool_calls=(call,))), Turn(says=Reply(text=f"It says {TOOL_RESULT}."))),
    )


DEFECT = """
import asyncio
from tokenbus_services.runtime import queue_work
from tokenbus_services.tools import executor, service

execute, service.STILL_S, queue_work.CHECK_S = executor.ToolExecutor.execute, 1.0, 0.2
service.ToolExecutor.timeout_of = lambda self, name, timeout_s=None: 1.0

async def defect(self, call, *args, **more):
    if "nowhere" in call.arguments:
        await asyncio.Event().wait()
    return await execute(self, call, *args, **more)

executor.ToolExecutor.execute = defect
"""


async def test_a_stuck_call_ends_soon_after_its_own_timeout_and_holds_up_no_other(
    server: Server, server_url: str, keys: Keys, tmp_path: Path, send: Send
) -> None:
    (tmp_path / "sitecustomize.py").write_text(DEFECT)
    async with MockProvider([calls("fine", "Oslo"), calls("stuck", "nowhere")]) as provider:
        fleet = Fleet(tmp_path, server_url, keys, provider.url)
        try:
            await fleet.start("tools", env={"PYTHONPATH": str(tmp_path)})
            await fleet.start("fetcher", "normalizer", "parser")
            stuck = await send("stuck", tools=[WEATHER])
            beside = [await send("fine", tools=[WEATHER]) for _ in range(4)]
            logs = await ended(server.client, keys, [stuck, *beside], timeout=60)
        finally:
            await fleet.stop()
    assert [logs[run][-1]["type"] for run in beside] == ["completed"] * 4
    last: Any = logs[stuck][-1]
    assert (last["type"], last["error"]["code"]) == ("failed", "poison")
    assert "work_stuck: the work made no progress for 2 s" in last["error"]["message"]
