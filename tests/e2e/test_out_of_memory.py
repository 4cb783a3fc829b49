"""A server that runs out of memory under running services: all stand still, live on, and lose nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.exceptions import ResponseError

from tests.e2e import judge
from tests.e2e.conftest import WEATHER, sender
from tests.e2e.fleet import WITH_TOOLS, Worker, ended, fleet, log_of
from tests.e2e.test_disturbed import TURNS, undisturbed
from tests.servers import binary
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server import Server
from tokenbus_services.embedded import EmbeddedServer
from tokenbus_services.replay import Delivery, ReplayServer, Script, Turn

RUNS = 6


async def is_ready(worker: Worker, *, status: int) -> bool:
    async with httpx.AsyncClient(timeout=60) as http:
        return (await http.get(f"{worker.url}/ready")).status_code == status


async def test_a_full_server_stops_intake_and_runs_and_then_all_go_on_with_nothing_lost(tmp_path: Path) -> None:
    keys = Keys(prefix="full", partitions=2)
    script = Script(name="story", turns=tuple(Turn(says=reply, delivery=Delivery(pace=40)) for reply in TURNS))
    with EmbeddedServer(binary=binary()) as process:
        async with (
            ReplayServer([script]) as provider,
            fleet(tmp_path, process.url, keys, provider.url, WITH_TOOLS) as running,
            Server(process.url) as server,
        ):
            send = sender(server, keys)
            runs = [f"run{n}" for n in range(RUNS)]
            for run in runs:
                await send("story", run, id=run, tools=[WEATHER], provider="openai-chat")

            async def under_way() -> bool:
                return all([len(await log_of(server.client, keys, run)) > 5 for run in runs])

            await eventually(under_way, timeout=60)
            await server.client.config_set("maxmemory", 1)
            with pytest.raises(ResponseError, match="maxmemory"):
                await send("story", "refused", id="refused", tools=[WEATHER], provider="openai-chat")
            for worker in running.workers:
                await eventually(lambda w=worker: is_ready(w, status=503), timeout=60)
            assert [worker.process.returncode for worker in running.workers] == [None] * len(WITH_TOOLS)
            await server.client.config_set("maxmemory", 0)
            await send("story", "later", id="later", tools=[WEATHER], provider="openai-chat")
            runs.append("later")
            logs: Any = await ended(server.client, keys, runs)
            for worker in running.workers:
                await eventually(lambda w=worker: is_ready(w, status=200), timeout=60)
    for run in runs:
        judge.check(logs[run])
        assert logs[run][-1]["type"] == "completed", logs[run][-1]
        [result] = [content for kind, content in judge.blocks(logs[run]) if kind == "tool_result"]
        assert [b for b in judge.blocks(logs[run]) if b[0] != "thinking"] == [
            b for b in undisturbed(run, result) if b[0] != "thinking"
        ]
