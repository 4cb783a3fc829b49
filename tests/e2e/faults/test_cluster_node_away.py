"""A node of a Cluster that answers nothing holds up its own partitions; runs of the others begin, stream and end."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from tests.e2e import judge
from tests.e2e.conftest import WEATHER, sender
from tests.e2e.fleet import WITH_TOOLS, ended, fleet, log_of
from tests.servers import cluster_group
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import Delivery, MockProvider, Reply, Script, ToolCall, Turn

KEYS = Keys("apart", 6)
RUNS = 3
SCRIPTS = [
    Script(
        name="story",
        turns=(
            Turn(says=Reply(tool_calls=(ToolCall(name="weather", arguments={"city": "Zug"}),))),
            Turn(says=Reply(text=" ".join(["word"] * 100)), delivery=Delivery(pace=100)),
        ),
    ),
    Script(name="long", turns=(Turn(says=Reply(text=" ".join(["word"] * 2000)), delivery=Delivery(pace=50)),)),
]
ONCE = ("requests", "members:parser", "members:normalizer")
"""A deployment has each once: a node that is unavailable with the first stops intake, with the others partitions keep
their owners."""


def names(partitions: set[int], count: int, prefix: str) -> list[str]:
    """Ids of runs in these partitions, as many in each."""
    found = {p: list[str]() for p in partitions}
    n = 0
    while any(len(runs) < count for runs in found.values()):
        run = f"{prefix}-{n}"
        n += 1
        if len(found.get(KEYS.partition_of(run), [None] * count)) < count:
            found[KEYS.partition_of(run)].append(run)
    return [run for runs in found.values() for run in runs]


async def test_a_stalled_node_delays_only_its_partitions(tmp_path: Path) -> None:
    with cluster_group(cluster_require_full_coverage="no") as group:
        once = {group.master_of(f"{KEYS.prefix}:{name}").port for name in ONCE}
        [node] = [node for node in group.nodes if node.port not in once]
        there = {p for p in range(KEYS.partitions) if group.master_of(KEYS.topic(p, "raw")) is node}
        elsewhere = set(range(KEYS.partitions)) - there
        assert there
        assert elsewhere
        async with (
            MockProvider(SCRIPTS) as provider,
            fleet(tmp_path, group.url, KEYS, provider.url, WITH_TOOLS) as running,
            Server(group.url) as server,
        ):
            send = sender(server, KEYS)
            open_there = names(there, 1, "there")
            open_elsewhere = names(elsewhere, 1, "elsewhere")
            for run in open_there + open_elsewhere:
                await send("long", id=run)

            async def is_closed() -> bool:
                return all([len(await log_of(server.client, KEYS, run)) > 5 for run in open_there + open_elsewhere])

            await eventually(is_closed)
            os.kill(node.pid, signal.SIGSTOP)
            try:
                late = names(there, RUNS, "late")
                beside = names(elsewhere, RUNS, "beside")
                for run in [*late, *beside]:
                    await send("story", id=run, tools=[WEATHER])
                before = {run: len(await log_of(server.client, KEYS, run)) for run in open_elsewhere}
                logs: Any = await ended(server.client, KEYS, beside, timeout=60)

                async def streams() -> bool:
                    now = {run: await log_of(server.client, KEYS, run) for run in open_elsewhere}
                    return all(
                        len(log) > before[run] + 20 or log[-1]["type"] == "completed" for run, log in now.items()
                    )

                await eventually(streams)
            finally:
                os.kill(node.pid, signal.SIGCONT)
            logs |= await ended(server.client, KEYS, [*late, *open_there, *open_elsewhere])
            assert [worker.process.returncode for worker in running.workers] == [None] * len(WITH_TOOLS)
    for run, log in logs.items():
        judge.check(log)
        assert log[-1]["type"] == "completed", (run, log[-1])
