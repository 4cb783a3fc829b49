"""EventSource of a real browser at the gateway: it reads a run, comes back by itself, and stops after the end."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.console.browser import browser, executable
from tests.services.cli.process import running
from tests.waiting import eventually
from tokenbus.testing import LocalBus, Reply, Stall, Turn
from tokenbus_services.process.embedded_server import free_port

TEXT = "Yes, take it along."
READ = """
(url) => {
  window.seqs = []; window.ends = 0; window.over = false;
  window.messages = [];
  const plain = new EventSource(url + "?names=false");
  plain.onmessage = (event) => window.messages.push(Number(event.lastEventId));
  plain.onerror = () => (window.plain = plain.readyState === EventSource.CLOSED);
  const source = new EventSource(url);
  const types = ["started", "answering", "block_start", "chunk", "block_complete", "usage", "completed"];
  for (const type of types) source.addEventListener(type, (event) => window.seqs.push(Number(event.lastEventId)));
  source.addEventListener("completed", () => (window.ends += 1));
  source.onerror = () => (window.over = source.readyState === EventSource.CLOSED);
}
"""


@pytest.fixture(scope="module")
def bus() -> Generator[LocalBus]:
    executable()
    with LocalBus("") as local:
        local.model_says("stalls", Turn(says=Reply(text=TEXT), fault=Stall(after_text="take")))
        yield local


async def test_it_reads_a_run_over_a_gateway_that_was_replaced_and_stops_after_the_end(
    bus: LocalBus, tmp_path: Path
) -> None:
    port = free_port()
    config = tmp_path / "tokenbus.toml"
    config.write_text(
        f'redis_url = "{bus.url}"\ndata_dir = "{tmp_path}"\n[gateway]\n\n'
        f'[providers.anthropic]\napi = "anthropic"\nbase_url = "http://127.0.0.1:1"\napi_key_env = ""\n'
    )

    def gateway(name: str) -> Any:
        arguments = ("worker", "gateway", "--port", str(port))
        return running(tmp_path / name, *arguments, TOKENBUS_CONFIG=str(config))

    base = f"http://127.0.0.1:{port}"
    async with browser() as chromium:
        page = await (await chromium.new_context()).new_page()
        async with gateway("first.log") as worker, httpx.AsyncClient(base_url=base, timeout=60) as http:
            await worker.says("ready gateway")
            body = {"model": "anthropic/stalls", "messages": [{"role": "user", "content": "hello"}]}
            run = (await http.post("/runs", json=body)).json()["run"]
            await page.goto(f"{base}/health")
            await page.evaluate(READ, f"/runs/{run}/events")
            await eventually(lambda: bus.exchanges and bus.exchanges[-1].state == "stalled")
            await _until(page, "window.seqs.length > 2")
        # That gateway was killed, and the browser asks again and again until another one is there.
        async with gateway("second.log") as worker:
            await worker.says("ready gateway")
            bus.resume(bus.exchanges[-1])
            await _until(page, "window.over && window.plain")
            seqs, ends, messages = await page.evaluate("[window.seqs, window.ends, window.messages]")
    with bus.sync_client() as client:
        assert seqs == messages == [event.seq for event in client.follow(run)]
    assert ends == 1


async def _until(page: Any, condition: str) -> None:
    await eventually(lambda: page.evaluate(condition))
