"""A defect in an attempt: its task waits for what never comes, and no timeout of its own ends it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.e2e.conftest import Send
from tests.e2e.fleet import Fleet, ended, provider_table
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import MockProvider, Reply, Script, Turn

FINE = Script(name="fine", turns=(Turn(says=Reply(text="Hello there")),))
STUCK = Script(name="stuck", turns=(Turn(says=Reply(text="never asked for")),))
TIMEOUTS = "connect_timeout_s = 1\nfirst_event_timeout_s = 1\nidle_timeout_s = 1"
DEFECT = """
import asyncio
from tokenbus_services.fetcher import service
from tokenbus_services.fetcher.calls import provider_call
from tokenbus_services.runtime import queue_work

read, service.STILL_S, queue_work.CHECK_S = provider_call._read, 1.0, 0.2

async def defect(endpoint, request, *args, silence, **more):
    if request.model == "stuck":
        await asyncio.Event().wait()
    return await read(endpoint, request, *args, silence=silence, **more)

provider_call._read = defect
"""


async def test_a_stuck_attempt_ends_soon_after_its_own_timeouts_and_not_after_the_longest_of_all(
    server: Server, server_url: str, keys: Keys, tmp_path: Path, send: Send
) -> None:
    (tmp_path / "sitecustomize.py").write_text(DEFECT)
    async with MockProvider([FINE, STUCK]) as provider:
        quick = provider_table("quick", "anthropic", provider.url, TIMEOUTS)
        fleet = Fleet(tmp_path, server_url, keys, provider.url, quick)
        try:
            await fleet.start("fetcher", env={"PYTHONPATH": str(tmp_path)})
            await fleet.start("normalizer", "parser")
            stuck = await send("stuck", provider="quick")
            beside = [await send("fine", provider="quick") for _ in range(4)]
            logs = await ended(server.client, keys, [stuck, *beside], timeout=60)
        finally:
            await fleet.stop()
    assert [logs[run][-1]["type"] for run in beside] == ["completed"] * 4
    last: Any = logs[stuck][-1]
    assert (last["type"], last["error"]["code"]) == ("failed", "poison")
    assert "work_stuck: the work made no progress for 4 s" in last["error"]["message"]
