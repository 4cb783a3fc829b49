"""A gateway that stops ends whatever it answers in words, and a reader that left costs nothing."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from tests.services.cli.process import Command, running
from tests.waiting import eventually
from tokenbus.testing import LocalBus
from tokenbus_services.mock_provider import Delivery, Reply, Stall, Turn

CLOSED = {"/v1/responses": "response.completed", "/api/chat": "end"}
SLOW: Any = {"model": "anthropic/slow", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def bus() -> Generator[LocalBus]:
    with LocalBus("[gateway]\nkeep_alive_s = 0.1\n") as running:
        running.model_says("slow", Turn(says=Reply(text="one two three"), fault=Stall(after_text="two")))
        words = " ".join(f"word{n}" for n in range(60))
        running.model_says("long", Turn(says=Reply(text=words), delivery=Delivery(pace=20)))
        yield running


@asynccontextmanager
async def gateway(bus: LocalBus, directory: Path, leave_s: float) -> AsyncGenerator[tuple[Command, httpx.AsyncClient]]:
    provider = '[providers.anthropic]\napi = "anthropic"\nbase_url = "http://127.0.0.1:1"\napi_key_env = ""\n'
    config = directory / "tokenbus.toml"
    tables = f"{provider}[gateway]\nleave_s = {leave_s}\n[console]\n"
    config.write_text(f'redis_url = "{bus.url}"\ndata_dir = "{directory}"\n{tables}')
    async with running(directory / "log", "worker", "gateway", "--port", "0", TOKENBUS_CONFIG=str(config)) as worker:
        url = (await worker.says("ready gateway")).split()[2]
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            yield worker, http
        assert await worker.process.wait() == 0
        log = worker.log.read_text()
        assert "Traceback" not in log
        assert '"error"' not in log


async def test_every_answer_of_a_gateway_that_stops_has_an_end_with_a_name(bus: LocalBus, tmp_path: Path) -> None:
    """What has no end of its own ends at the first signal, the rest at the second or after `stages.drain_s`."""
    async with gateway(bus, tmp_path, leave_s=0) as (worker, http):
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

        endless = ("/topics/chunks?from=start", f"/v1/stream/{run}?offset=-1&live=sse", "/console/api/stream")
        readers = {path: asyncio.create_task(read(path)) for path in (*endless, f"/runs/{run}/events")}
        waiting = asyncio.create_task(http.get(f"/runs/{run}", params={"wait": "true"}))
        for _ in readers:
            await asyncio.wait_for(begun.get(), 60)
        await eventually(lambda: _open(str(http.base_url), "native", 3))
        worker.process.terminate()
        ends = {path: await readers[path] for path in endless}
        assert not waiting.done()
        worker.process.terminate()
        ends = {path: await reader for path, reader in readers.items()}
        whole = await waiting
    assert (whole.status_code, whole.json()["error"]["code"]) == (503, "gateway_restarting")
    for path, (status, text) in ends.items():
        assert status == 200
        assert "gateway_restarting" in text.rstrip().rpartition("\n\n")[2], (path, text[-300:])


async def test_a_gateway_that_stops_finishes_what_it_streams_and_refuses_nobody_who_asks_whether_it_is_ready(
    bus: LocalBus, tmp_path: Path
) -> None:
    async with gateway(bus, tmp_path, leave_s=3) as (worker, http):
        said = ""
        request = {**SLOW, "model": "anthropic/long", "stream": True}
        async with http.stream("POST", "/v1/chat/completions", json=request) as answer:
            lines = answer.aiter_lines()
            while "word1" not in said:
                said += await anext(lines)
            worker.process.terminate()

            async def left() -> bool:
                """As a balancer: a connection for each question and each request, none of which may fail."""
                async with httpx.AsyncClient(base_url=http.base_url, timeout=60) as other:
                    ready = await other.get("/ready")
                    one = await other.get("/v1/models")
                assert one.status_code == 200
                return ready.status_code == 503 and one.headers.get("connection") == "close"

            await eventually(left)
            async for line in lines:
                said += line
    assert said.endswith("data: [DONE]")
    assert "word59" in said


def _said(path: str, model: str, **options: Any) -> str:
    """A frame that asks for an answer of this model."""
    body = {"model": f"anthropic/{model}", **({"tokenbus": options} if options else {})}
    if path == "/v1/responses":
        return json.dumps({"type": "response.create", "input": "hello", **body})
    hello = {"id": "m1", "role": "user", "parts": [{"type": "text", "text": "hello"}]}
    return json.dumps(
        {
            "type": "send",
            "requestId": model,
            "id": f"chat-{uuid.uuid4()}",
            "trigger": "submit-message",
            "messages": [hello],
            "body": body,
        }
    )


@pytest.mark.parametrize("path", CLOSED)
async def test_a_socket_of_a_gateway_that_stops_gets_its_answer_to_the_end(
    bus: LocalBus, tmp_path: Path, path: str
) -> None:
    async with gateway(bus, tmp_path, leave_s=0) as (worker, http):
        address = f"ws://{http.base_url.host}:{http.base_url.port}{path}"
        async with connect(address) as busy, connect(address) as idle:
            await busy.send(_said(path, "long"))
            said = ""
            while "word1" not in said:
                said += str(await busy.recv())
            worker.process.terminate()
            with pytest.raises(ConnectionClosed):
                await idle.recv()
            assert idle.close_code == 1012
            with suppress(ConnectionClosed):
                while True:
                    said += str(await busy.recv())
            assert busy.close_code == 1012
    assert f'"type":"{CLOSED[path]}"' in said
    assert "word59" in said


@pytest.mark.parametrize("path", CLOSED)
async def test_the_run_of_a_socket_that_its_gateway_cuts_at_the_second_signal_goes_on(
    bus: LocalBus, tmp_path: Path, path: str
) -> None:
    """Even one that is cancelled when its client leaves: the client has not left."""
    async with gateway(bus, tmp_path, leave_s=0) as (worker, http):
        address = f"ws://{http.base_url.host}:{http.base_url.port}{path}"
        async with connect(address) as busy, connect(address) as idle:
            await busy.send(_said(path, "slow", on_disconnect="cancel"))
            said = ""
            while "two" not in said:
                said += str(await busy.recv())
            worker.process.terminate()
            with pytest.raises(ConnectionClosed):  # the first signal has arrived
                await idle.recv()
            worker.process.terminate()
            with suppress(ConnectionClosed):
                while True:
                    said += str(await busy.recv())
            assert busy.close_code == 1012
    [run] = set(re.findall(r'"run":"([^"]+)"', said)) or set(re.findall(r'"id":"resp_([^"]+)"', said))
    async with httpx.AsyncClient(base_url=bus.gateway) as http:
        assert (await http.get(f"/runs/{run}")).json()["status"] == "open"


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
