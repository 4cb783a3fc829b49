"""The server killed in the middle and started again: the workers come back, and the runs come out exactly."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import judge
from tests.e2e.conftest import WEATHER
from tests.e2e.fleet import WITH_TOOLS, ended, fleet, log_of
from tests.e2e.test_disturbed import TURNS, undisturbed
from tests.servers import binary
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server import Server
from tokenbus_services.embedded import EmbeddedServer
from tokenbus_services.replay import Delivery, ReplayServer, Script, Turn

RUNS = 12


@pytest.mark.timeout(120)
async def test_runs_outlast_a_server_that_is_killed_and_started_again(tmp_path: Path) -> None:
    keys = Keys(prefix="gone", partitions=4)
    script = Script(name="story", turns=tuple(Turn(says=reply, delivery=Delivery(pace=40)) for reply in TURNS))
    data = tmp_path / "data"
    with EmbeddedServer(data, binary=binary(), appendonly=True) as process:
        async with (
            ReplayServer([script]) as provider,
            fleet(tmp_path, process.url, keys, provider.url, WITH_TOOLS),
            Server(process.url) as server,
        ):
            runs = [f"run{i}" for i in range(RUNS)]
            for run in runs:
                request = {
                    "type": "generate",
                    "id": run,
                    "provider": "anthropic",
                    "model": "story",
                    "messages": [{"role": "user", "content": run}],
                    "tools": [WEATHER],
                }
                await server.client.xadd(keys.requests, {"__data__": json.dumps(request)})
            for times in (1, 2):

                async def under_way(times: int = times) -> bool:
                    return len(await log_of(server.client, keys, runs[0])) > 12 * times

                await eventually(under_way, timeout=20)
                os.kill(process.pid, signal.SIGKILL)
                process.stop()
                process.start()
                await server.client.connection_pool.disconnect()
            logs: Any = await ended(server.client, keys, runs, timeout=60)
    for run in runs:
        judge.check(logs[run])
        assert logs[run][-1]["type"] == "completed", logs[run][-1]
        [result] = [content for kind, content in judge.blocks(logs[run]) if kind == "tool_result"]
        assert judge.blocks(logs[run]) == undisturbed(run, result)
