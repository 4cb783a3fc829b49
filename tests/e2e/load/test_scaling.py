"""Workers join and leave while runs stream: shares become even, no run is cut, and idle workers do no harm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from tests.e2e import judge
from tests.e2e.conftest import Send
from tests.e2e.fleet import CHAINED, PIPELINE, Worker, ended, fleet, log_of
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import Delivery, MockProvider, Reply, Script, Turn

STAGES = ("normalizer", "parser")
WORDS = " ".join(f"word{n}" for n in range(300))
RUNS = 8
PATIENT = "[stages]\ndrain_s = 50\n"
"""A pipeline worker that stops finishes its provider calls within this."""


async def test_shares_even_out_and_no_call_is_made_twice_while_workers_join_and_leave(
    server: Server, server_url: str, send: Send, keys: Keys, tmp_path: Path
) -> None:
    keys = Keys(keys.prefix, partitions=2)
    script = Script(name="story", turns=(Turn(says=Reply(text=WORDS), delivery=Delivery(pace=30)),))

    async def owners(stage: str) -> set[str]:
        found = [await server.client.hget(keys.lease(p, stage), "owner") for p in range(keys.partitions)]
        return {owner.decode() for owner in found if owner}

    async def shared(stage: str, workers: list[Worker]) -> bool:
        """Whether each partition is one of these workers', and each worker of a stage has its share."""
        pids = [worker.process.pid for worker in workers if worker.runs(stage)]
        of = [next((pid for pid in pids if f"-{pid}-" in owner), None) for owner in await owners(stage)]
        return None not in of and len(of) == min(len(pids), keys.partitions)

    async with (
        MockProvider([script]) as provider,
        fleet(tmp_path, server_url, keys, provider.url, PIPELINE, PATIENT) as running,
    ):
        first = list(running.workers)
        runs = [await send("story") for _ in range(RUNS)]

        async def streaming() -> bool:
            return all([len(await log_of(server.client, keys, run)) > 10 for run in runs])

        await eventually(streaming, timeout=60)
        joining = CHAINED if PIPELINE == CHAINED else STAGES
        joined = await running.start(*joining * keys.partitions, "fetcher")
        for stage in STAGES:
            await eventually(lambda s=stage: shared(s, running.workers), timeout=60)
        await eventually(lambda: all_ready(running.workers))  # of each stage one more than there are partitions
        for worker in first:
            if any(worker.runs(stage) for stage in STAGES):
                assert await worker.stop() == 0
        for stage in STAGES:
            await eventually(lambda s=stage: shared(s, joined), timeout=60)
        runs += [await send("story") for _ in range(RUNS)]
        logs: Any = await ended(server.client, keys, runs)
    assert len(provider.requests) == len(runs)
    for run in runs:
        judge.check(logs[run])
        assert judge.text(logs[run]) == WORDS
        assert {event["attempt"] for event in logs[run]} == {1}


async def all_ready(workers: list[Worker]) -> bool:
    async with httpx.AsyncClient(timeout=60) as http:
        return all([(await http.get(f"{worker.url}/ready")).status_code == 200 for worker in workers])
