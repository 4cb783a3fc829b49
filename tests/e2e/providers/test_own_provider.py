"""A provider API in a package of its own, the one of docs/examples/tokenbus-acme: installed, named, used."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import judge
from tests.e2e.conftest import WEATHER, Send
from tests.e2e.fleet import LAUNCH, WITH_TOOLS, Fleet, ended
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server

PACKAGE = Path(__file__).parents[3] / "docs" / "examples" / "tokenbus-acme"
TABLE = '[providers.acme-eu]\napi = "acme"\nbase_url = "%s/v1"\nquirks = { options = { region = "eu" } }\n'
KEY = "acme-key-0123456789"
CALLS = [{"text": "Let me "}, {"text": "look."}, {"call": {"id": "c1", "name": "weather", "input": {"city": "Bern"}}}]
SAYS = [{"text": "It rains."}, {"end": "done", "in": 12, "out": 34}]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the package installed in it, its metadata included."""
    wheels, site = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(wheels), str(PACKAGE)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    [wheel] = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as package:
        package.extractall(site)
    return site


class ReceivedRequest:
    """What Acme was asked."""

    def __init__(self, head: str, body: Any) -> None:
        self.path = head.split()[1]
        self.headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
        self.body = body


@asynccontextmanager
async def acme(*answers: tuple[int, list[Any]]) -> AsyncGenerator[tuple[str, list[ReceivedRequest]]]:
    """Acme itself: each request gets the next answer. Its address, and what it was asked."""
    received: list[ReceivedRequest] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        size = int(next(line for line in head.lower().split("\r\n") if line.startswith("content-length")).split()[1])
        received.append(ReceivedRequest(head, json.loads(await reader.readexactly(size))))
        status, events = answers[len(received) - 1]
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) if status < 300 else json.dumps(events[0])
        kind = "text/event-stream" if status < 300 else "application/json"
        writer.write(
            f"HTTP/1.1 {status} x\r\ncontent-type: {kind}\r\nconnection: close\r\n"
            f"content-length: {len(body)}\r\n\r\n{body}".encode()
        )
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", received


async def test_a_provider_of_a_package_is_used_as_any_other(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path, site: Path
) -> None:
    busy = {"error": {"type": "overloaded_error", "message": "later"}}
    answers = ((503, [busy]), (200, [*CALLS, {"end": "done"}]), (200, SAYS))
    async with acme(*answers) as (url, received):
        fleet = Fleet(tmp_path, server_url, keys, url, TABLE % url + "[retry]\nbase_delay_s = 0.02\n")
        try:
            await fleet.start(*WITH_TOOLS, env={"PYTHONPATH": str(site), "ACME_API_KEY": KEY})
            run = await send("acme-1", "Is it raining?", provider="acme-eu", tools=[WEATHER], max_tokens=99)
            refused = await send("acme-1", provider="acme-eu", mode="prefill", participant="Claude")
            logs: Any = await ended(server.client, keys, [run, refused])
        finally:
            await fleet.stop()
    log = logs[run]
    judge.check(log)
    assert log[-1]["type"] == "completed", log[-1]
    [retrying] = [e for e in log if e["type"] == "retrying"]
    assert (retrying["error"]["class"], retrying["error"]["message"]) == ("overloaded", "later")
    kinds = [(kind, whole) for kind, whole in judge.blocks(log) if kind != "tool_result"]
    assert kinds == [("text", "Let me look."), ("tool_call", '{"city": "Bern"}'), ("text", "It rains.")]
    assert log[-1]["usage"] == {"input": 12, "output": 34}
    assert [a.path for a in received] == ["/v1/talk"] * 3
    assert all(a.headers["authorization"] == f"bearer {KEY}" for a in received)
    assert (received[0].body["region"], received[0].body["limit"]) == ("eu", 99)
    assert [line["who"] for line in received[2].body["lines"]] == ["user", "assistant", "assistant", "tool"]
    assert received[2].body["lines"][-1]["call"] == "c1"
    [failed] = [e for e in logs[refused] if e["type"] == "failed"]
    assert (failed["error"]["code"], failed["error"]["where"]) == ("request_invalid", "mode")


@pytest.mark.parametrize("installed", [False, True], ids=["not there", "two of a name"])
def test_a_provider_of_no_package_or_of_two_is_an_error_at_start(
    tmp_path: Path, site: Path, *, installed: bool
) -> None:
    config = tmp_path / "tokenbus.toml"
    config.write_text(TABLE % "http://127.0.0.1:1")
    paths: list[str] = []
    if installed:
        other = tmp_path / "other" / "acme_fork-2.0.dist-info"
        other.mkdir(parents=True)
        (other / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-fork\nVersion: 2.0\n")
        (other / "entry_points.txt").write_text("[tokenbus.providers]\nacme = acme_fork:provider\n")
        paths = [str(site), str(other.parent)]
    env = {**os.environ, "TOKENBUS_CONFIG": str(config), "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", LAUNCH, "worker", "fetcher", "--port", "0"]
    started = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, check=False)
    assert started.returncode == 2
    error_text = " ".join(started.stderr.split())
    expected = "'acme' is provided by acme-fork 2.0 and tokenbus-acme 1.0" if installed else "unknown API 'acme'"
    assert expected in error_text, error_text
