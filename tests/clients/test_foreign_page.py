"""A web page of another site in a real browser, at a gateway without keys: it takes nothing away from a group."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx

from tests.console.browser import browser, executable
from tests.services.cli.process import running
from tests.waiting import eventually
from tokenbus.testing import LocalBus, Reply, Turn
from tokenbus_services.process.embedded_server import free_port

RUNS = 8
TAKE = """
async (url) => {
  const again = (take, left = 20) => left && take().finally(() => setTimeout(() => again(take, left - 1), 20));
  again(() => fetch(url, {mode: "no-cors"}).then((answer) => answer.text()).catch(() => {}));
  again(() => fetch(url, {mode: "cors"}).then((answer) => answer.text()).catch(() => {}));
  new EventSource(url);
  for (const [tag, where] of [["img", "src"], ["script", "src"], ["iframe", "src"], ["link", "href"]]) {
    const element = document.createElement(tag);
    if (tag === "link") element.rel = "stylesheet";
    element[where] = url;
    document.body.append(element);
  }
  await new Promise((done) => setTimeout(done, 500));
}
"""


async def _page(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 13\r\nConnection: close\r\n\r\n<body></body>"
    )
    await writer.drain()
    writer.close()


async def test_a_page_of_another_site_takes_no_event_of_a_group(tmp_path: Path) -> None:
    executable()
    with LocalBus("") as bus:
        bus.model_says("any", Turn(says=Reply(text="Hello.")))
        port = free_port()
        config = tmp_path / "tokenbus.toml"
        config.write_text(
            f'redis_url = "{bus.url}"\ndata_dir = "{tmp_path}"\n[gateway]\n\n'
            f'[providers.anthropic]\napi = "anthropic"\nbase_url = "http://127.0.0.1:1"\napi_key_env = ""\n'
        )
        site = await asyncio.start_server(_page, "127.0.0.1", 0)
        base, topic = f"http://127.0.0.1:{port}", "/topics/runs?group=ours&from=start"
        arguments = ("worker", "gateway", "--port", str(port))
        async with (
            site,
            running(tmp_path / "gateway.log", *arguments, TOKENBUS_CONFIG=str(config)) as worker,
            httpx.AsyncClient(base_url=base, timeout=60) as http,
            browser() as chromium,
        ):
            await worker.says("ready gateway")
            page = await (await chromium.new_context()).new_page()
            answers: list[int] = []
            page.on("response", lambda answer: answers.append(answer.status) if topic in answer.url else None)
            await page.goto(f"http://localhost:{site.sockets[0].getsockname()[1]}/")
            body = {"model": "anthropic/any", "messages": [{"role": "user", "content": "hello"}]}
            runs = {(await http.post("/runs", json=body)).json()["run"] for _ in range(RUNS)}
            await page.evaluate(TAKE, base + topic)
            await eventually(lambda: len(answers) > 0)
            assert set(answers) == {403}
            ended: set[str] = set()
            async with http.stream("GET", topic) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data:") and '"type":"completed"' in line:
                        ended |= {run for run in runs if run in line}
                    if ended == runs:
                        break
            taken: Any = runs - ended
            assert taken == set()
