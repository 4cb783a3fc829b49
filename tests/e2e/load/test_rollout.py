"""A planned restart cuts nothing: fetchers and pipelines stop one after another, and answers end as if none had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e import judge
from tests.e2e.conftest import Send
from tests.e2e.fleet import Kind, Worker, ended, fleet, log_of
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import Delivery, MockProvider, Reply, Script, Turn

WORDS = " ".join(f"word{n}" for n in range(120))
"""At 15 a second: 8 s, which is longer than any other test's fetcher drains."""
DEFAULT = "# drain_s: the default\n"


@pytest.mark.parametrize("kinds", [("fetcher", "fetcher", "normalizer", "parser"), ("pipeline", "pipeline")], ids=len)
async def test_fetchers_and_pipelines_that_stop_one_after_another_cut_no_answer(
    server: Server, server_url: str, send: Send, keys: Keys, tmp_path: Path, kinds: tuple[Kind, ...]
) -> None:
    script = Script(name="long", turns=(Turn(says=Reply(text=WORDS), delivery=Delivery(pace=15)),))
    async with (
        MockProvider([script]) as provider,
        fleet(tmp_path, server_url, keys, provider.url, kinds, DEFAULT) as running,
    ):
        callers = [worker for worker in running.workers if worker.runs("fetcher")]
        runs: list[str] = []

        async def all_call() -> bool:
            runs.append(await send("long"))
            return all([await calls(worker) for worker in callers])

        await eventually(all_call, timeout=60)
        first = runs[-1]
        await eventually(lambda: log_of(server.client, keys, first), timeout=60)
        for worker in callers:
            worker.process.terminate()
            await eventually(lambda w=worker: drains(w))
        await running.start(kinds[0])
        runs.append(await send("long"))
        logs: Any = await ended(server.client, keys, runs)
        for worker in callers:
            assert await worker.process.wait() == 0
    assert len(provider.requests) == len(runs)
    for run in runs:
        judge.check(logs[run])
        assert logs[run][-1]["type"] == "completed"
        assert judge.text(logs[run]) == WORDS
        assert {event["attempt"] for event in logs[run]} == {1}


async def calls(worker: Worker) -> int:
    """How many provider calls it makes; its page is there while it drains."""
    async with httpx.AsyncClient(base_url=worker.url, timeout=60) as http:
        page = (await http.get("/metrics")).text
    [line] = [line for line in page.splitlines() if line.startswith("tokenbus_attempts_running ")]
    return round(float(line.split()[1]))


async def drains(worker: Worker) -> bool:
    async with httpx.AsyncClient(base_url=worker.url, timeout=60) as http:
        says = (await http.get("/ready")).status_code
    return says == 503 and await calls(worker) > 0
