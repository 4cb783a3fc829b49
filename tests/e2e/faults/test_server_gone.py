"""The server killed in the middle: workers come back with it, and the runs come out exactly; or they end without it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from tests.e2e import judge
from tests.e2e.conftest import WEATHER, sender
from tests.e2e.faults.test_disturbed import TURNS, undisturbed
from tests.e2e.fleet import WITH_TOOLS, ended, fleet, log_of
from tests.servers import binary
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import Delivery, MockProvider, Script, Turn
from tokenbus_services.process.embedded_server import EmbeddedServer

RUNS = 12
LONGEST_END_S = 120
"""`stages.drain_s` for what may yet come to an end, and what a slow machine needs for the rest."""


async def test_runs_outlast_a_server_that_is_killed_and_started_again(tmp_path: Path) -> None:
    keys = Keys(prefix="gone", partitions=4)
    script = Script(name="story", turns=tuple(Turn(says=reply, delivery=Delivery(pace=40)) for reply in TURNS))
    data = tmp_path / "data"
    with EmbeddedServer(data, binary=binary(), appendonly=True) as process:
        async with (
            MockProvider([script]) as provider,
            fleet(tmp_path, process.url, keys, provider.url, WITH_TOOLS),
            Server(process.url) as server,
        ):
            send = sender(server, keys)
            runs = [f"run{i}" for i in range(RUNS)]
            for run in runs:
                await send("story", run, id=run, tools=[WEATHER])
            for times in (1, 2):

                async def under_way(times: int = times) -> bool:
                    return len(await log_of(server.client, keys, runs[0])) > 12 * times

                await eventually(under_way, timeout=60)
                os.kill(process.pid, signal.SIGKILL)
                process.stop()
                process.start()
                await server.client.connection_pool.disconnect()
            logs: Any = await ended(server.client, keys, runs)
    for run in runs:
        judge.check(logs[run])
        assert logs[run][-1]["type"] == "completed", logs[run][-1]
        [result] = [content for kind, content in judge.blocks(logs[run]) if kind == "tool_result"]
        assert judge.blocks(logs[run]) == undisturbed(run, result)


async def test_workers_end_on_a_signal_without_a_server(tmp_path: Path) -> None:
    keys = Keys(prefix="gone", partitions=2)
    script = Script(name="story", turns=tuple(Turn(says=reply, delivery=Delivery(pace=20)) for reply in TURNS))
    with EmbeddedServer(binary=binary()) as process:
        async with (
            MockProvider([script]) as provider,
            fleet(tmp_path, process.url, keys, provider.url, WITH_TOOLS) as running,
            Server(process.url) as server,
        ):
            send = sender(server, keys)
            for run in ("a", "b", "c"):
                await send("story", run, id=run, tools=[WEATHER])

            async def under_way() -> bool:
                return all([len(await log_of(server.client, keys, run)) > 5 for run in ("a", "b", "c")])

            await eventually(under_way, timeout=60)
            process.stop()
            # Runs are in progress, and no server will ever accept their output.
            async with asyncio.timeout(LONGEST_END_S):
                assert await asyncio.gather(*(worker.stop() for worker in running.workers)) == [0] * len(WITH_TOOLS)
