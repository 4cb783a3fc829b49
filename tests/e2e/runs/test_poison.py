"""Poison on every stream of the bus, through the running services: buried with its origin, its run failed, and the rest
continues; and what `tokenbus dead` then makes of it."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from tests.e2e.conftest import Deploy, Send
from tests.e2e.fleet import WITH_TOOLS, ended, log_of
from tests.services.cli.process import run as command
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.events.frames import TurnWork, encode
from tokenbus_services.mock_provider import Delivery, Reply, Script, Turn

HELLO = Script(name="hello", turns=(Turn(says=Reply(text="Hello there")),))
SILENT = Script(name="silent", turns=(Turn(says=Reply(text="late"), delivery=Delivery(delay_s=3600)),))
STAGES = {"turns": "fetcher", "raw": "normalizer", "events": "parser", "tools": "tools"}
"""Who reads each internal topic."""
POISON = b"\xc1 poison"


async def test_poison_of_every_origin_is_buried_and_what_it_stopped_is_asked_again(
    server: Server, keys: Keys, send: Send, tmp_path: Path, deployed: Deploy
):
    async with deployed([HELLO, SILENT], WITH_TOOLS):
        victims = {topic: await send("silent", id=f"poisoned-{topic}") for topic in STAGES}
        entries: dict[str, str] = {}
        for topic, run in victims.items():
            await eventually(lambda run=run: server.client.xlen(keys.log(run)))
            stream = keys.topic(keys.partition_of(run), topic)  # pyright: ignore[reportArgumentType]
            entries[run] = (await server.client.xadd(stream, {run: POISON})).decode()
        garbage = (await server.client.xadd(keys.requests, {"__data__": POISON})).decode()
        logs = await ended(server.client, keys, list(victims.values()))
        for run, log in logs.items():
            error: Any = log[-1]["error"]
            assert (log[-1]["type"], error["code"], error["class"]) == ("failed", "poison", "internal"), run

        async def is_dead_letter() -> bool:
            return await server.client.xlen(keys.dead) == len(victims) + 1

        await eventually(is_dead_letter)
        dead = {e.get("run"): e for e in [json.loads(f[b"__data__"]) for _, f in await server.client.xrange(keys.dead)]}
        for topic, run in victims.items():
            entry = dead[run]
            assert (entry["stage"], entry["entry"]) == (STAGES[topic], entries[run])
            assert entry["stream"] == keys.topic(keys.partition_of(run), topic)  # pyright: ignore[reportArgumentType]
            assert base64.b64decode(entry["bytes"]) == POISON
            assert entry["reason"]
        entry = dead[None]
        assert (entry["stage"], entry["entry"], base64.b64decode(entry["bytes"])) == ("intake", garbage, POISON)

        again = await command("dead", "retry", "--all", "--json", TOKENBUS_CONFIG=str(tmp_path / "tokenbus.toml"))
        printed = [json.loads(line) for line in again.out.splitlines()]
        new = [line["run"] for line in printed if "run" in line]
        assert (again.code, len(new), len(printed)) == (1, len(victims), len(victims) + 1), "garbage stays"
        assert await server.client.xlen(keys.dead) == 1
        for run in new:
            await eventually(lambda run=run: server.client.xlen(keys.log(run)))
            await server.client.xadd(keys.requests, {"__data__": json.dumps({"type": "cancel", "run": run})})
        assert {log[-1]["type"] for log in (await ended(server.client, keys, new)).values()} == {"cancelled"}
        after = await send("hello")
        assert (await ended(server.client, keys, [after]))[after][-1]["type"] == "completed"


async def test_a_frame_of_an_unknown_run_stops_no_other_run(server: Server, keys: Keys, send: Send, deployed: Deploy):
    async with deployed([HELLO], WITH_TOOLS):
        work = encode(TurnWork("nobody", 0, 1))
        for topic in STAGES:
            for partition in range(keys.partitions):
                stream = keys.topic(partition, topic)  # pyright: ignore[reportArgumentType]
                await server.client.xadd(stream, {"nobody": work})
        runs = [await send("hello") for _ in range(8)]
        logs = await ended(server.client, keys, runs)
        assert {log[-1]["type"] for log in logs.values()} == {"completed"}
        assert await log_of(server.client, keys, "nobody") == []
