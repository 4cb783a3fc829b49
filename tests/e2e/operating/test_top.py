"""`tokenbus top` and `doctor` beside the running services."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.e2e.conftest import Deploy, Send
from tests.e2e.fleet import WITH_TOOLS, ended
from tests.services.cli.process import Ended
from tests.services.cli.process import run as command
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import Delivery, Reply, Script, Turn

SILENT = Script(name="silent", turns=(Turn(says=Reply(text="late"), delivery=Delivery(delay_s=3600)),))


async def test_top_sees_owners_idle_workers_and_open_runs_and_doctor_finds_all_at_work(
    server: Server, keys: Keys, send: Send, tmp_path: Path, deployed: Deploy
):
    config = str(tmp_path / "tokenbus.toml")

    async def top(*options: str) -> Ended:
        return await command("top", "--once", "--every", "0.2", *options, TOKENBUS_CONFIG=config)

    async def look() -> dict[str, Any]:
        return json.loads((await top("--json")).out)["now"]

    def open_runs(now: dict[str, Any]) -> int:
        [parser] = [stage for stage in now["stages"] if stage["name"] == "parser"]
        return sum(partition["open"] for partition in parser["partitions"])

    async with deployed([SILENT], WITH_TOOLS):
        runs = [await send("silent") for _ in range(6)]

        async def all_open() -> bool:
            now = await look()
            assert open_runs(now) == len(runs)
            assert all(partition["owner"] for stage in now["stages"] for partition in stage["partitions"])
            workers = {queue["name"]: len(queue["ages_ms"]) for queue in now["queues"]}
            assert workers == {"intake": 1, "fetcher": 1, "tools": 1}
            held = {queue["name"]: sum(stream["held"] for stream in queue["streams"]) for queue in now["queues"]}
            assert held["fetcher"] == len(runs)
            return True

        await eventually(all_open, timeout=60)
        assert "open runs 6" in (await top()).out
        examined = await command("doctor", "--json", TOKENBUS_CONFIG=config)
        found = {finding["about"]: finding["level"] for finding in json.loads(examined.out)}
        at_work = ("server", "deployment", "normalizer", "parser", "intake", "fetcher", "tools")
        assert {name: found[name] for name in at_work} == dict.fromkeys(at_work, "ok")
        for run in runs:
            await server.client.xadd(keys.requests, {"__data__": json.dumps({"type": "cancel", "run": run})})
        await ended(server.client, keys, runs)

        async def none_open() -> bool:
            return open_runs(await look()) == 0

        await eventually(none_open, timeout=60)
