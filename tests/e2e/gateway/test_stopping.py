"""A gateway that stops ends whatever it answers in words, and a reader that left costs nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.services.cli.process import running
from tests.waiting import eventually
from tokenbus.testing import LocalBus
from tokenbus_services.mock_provider import Reply, Stall, Turn

SLOW: Any = {"model": "anthropic/slow", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def bus() -> Generator[LocalBus]:
    with LocalBus("[gateway]\nkeep_alive_s = 0.1\n") as running:
        running.model_says("slow", Turn(says=Reply(text="one two three"), fault=Stall(after_text="two")))
        yield running


async def test_every_answer_of_a_gateway_that_stops_has_an_end_with_a_name(bus: LocalBus, tmp_path: Path) -> None:
    provider = '[providers.anthropic]\napi = "anthropic"\nbase_url = "http://127.0.0.1:1"\napi_key_env = ""\n'
    config = tmp_path / "tokenbus.toml"
    tables = f"{provider}[stages]\ndrain_s = 1\n[gateway]\n[console]\n"
    config.write_text(f'redis_url = "{bus.url}"\ndata_dir = "{tmp_path}"\n{tables}')
    async with running(tmp_path / "log", "worker", "gateway", "--port", "0", TOKENBUS_CONFIG=str(config)) as worker:
        url = (await worker.says("ready gateway")).split()[2]
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            run = (await http.post("/runs", json=SLOW)).json()["run"]
            begun: asyncio.Queue[str] = asyncio.Queue()

            async def read(path: str) -> tuple[int, str]:
                async with http.stream("GET", path) as answer:
                    text = ""
                    async for part in answer.aiter_text():
                        if not text:
                            begun.put_nowait(path)
                        text += part
                    return answer.status_code, text

            streams = (
                "/topics/chunks?from=start",
                f"/v1/stream/{run}?offset=-1&live=sse",
                "/console/api/stream",
                f"/runs/{run}/events",
            )
            readers = {path: asyncio.create_task(read(path)) for path in streams}
            waiting = asyncio.create_task(http.get(f"/runs/{run}", params={"wait": "true"}))
            for _ in streams:
                await asyncio.wait_for(begun.get(), 60)
            await eventually(lambda: _open(url, "native", 3))
            worker.process.terminate()
            ends = {path: await reader for path, reader in readers.items()}
            whole = await waiting
        assert await worker.process.wait() == 0
        log = worker.log.read_text()
        assert "Traceback" not in log
        assert '"error"' not in log
    assert (whole.status_code, whole.json()["error"]["code"]) == (503, "gateway_restarting")
    for path, (status, text) in ends.items():
        assert status == 200
        assert "gateway_restarting" in text.rstrip().rpartition("\n\n")[2], (path, text[-300:])


async def test_a_reader_that_left_before_the_runs_end_is_served_no_more(bus: LocalBus) -> None:
    async with httpx.AsyncClient(base_url=bus.gateway, timeout=60) as http:
        run = (await http.post("/runs", json=SLOW)).json()["run"]
        waiting = [asyncio.create_task(http.get(f"/runs/{run}", params={"wait": "true"})) for _ in range(3)]
        await eventually(lambda: _open(bus.gateway, "native", 3))
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await eventually(lambda: _open(bus.gateway, "native", 0))
        assert (await http.get(f"/runs/{run}")).json()["status"] == "open"


async def _open(url: str, surface: str, number: int) -> bool:
    async with httpx.AsyncClient(base_url=url) as http:
        text = (await http.get("/metrics")).text
    return f'tokenbus_gateway_open_answers{{surface="{surface}"}} {number}.0' in text
