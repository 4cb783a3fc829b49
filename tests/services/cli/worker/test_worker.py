"""`tokenbus worker` as a process: how it starts, how it refuses to, how it stops."""

from __future__ import annotations

import asyncio
import socket
import urllib.request
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests import fork_server
from tests.services.cli.process import environment, run, running, settings_file
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.layout import join_deployment
from tokenbus.bus.server.server import Server
from tokenbus_services.cli.service_registry import SERVICES
from tokenbus_services.mock_provider import Delivery, MockProvider, Reply, Script, Turn

SLOW = Script(name="slow", turns=(Turn(says=Reply(text="late"), delivery=Delivery(delay_s=3600)),))


@pytest.fixture
def config(server_url: str, keys: Keys, tmp_path: Path) -> str:
    """Settings of a deployment. For TOKENBUS_CONFIG."""
    text = f'redis_url = "{server_url}"\nprefix = "{keys.prefix}"\npartitions = {keys.partitions}'
    return settings_file(tmp_path, f'{text}\ndata_dir = "{tmp_path}"\n[records]\n[gateway]')


@pytest.fixture
def with_a_webhook(config: str) -> str:
    """The same, for every service."""
    hook = '[webhooks.one]\nurl = "https://example.com/"\nsecret_env = "HOOK"\n'
    Path(config).write_text(f"{Path(config).read_text()}{hook}")
    return config


@pytest.mark.parametrize("service", SERVICES)
async def test_a_service_says_when_it_is_ready_and_stops_in_order(with_a_webhook: str, tmp_path: Path, service: str):
    out, err = tmp_path / "out", tmp_path / "err"
    env = environment(TOKENBUS_CONFIG=with_a_webhook, HOOK="whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIz")
    worker = fork_server.shared().start("worker", service, stdout=out, stderr=err, env=env)
    try:
        await eventually(lambda: out.exists() and out.read_text().endswith("\n"))
        ready, name, url = out.read_text().split()
        assert (ready, name) == ("ready", service)
        with await asyncio.to_thread(urllib.request.urlopen, f"{url}/ready") as page:
            assert page.status == 200
        worker.terminate()
        assert await worker.wait() == 0
    finally:
        worker.kill()
    log = err.read_text()
    assert "started" in log
    assert "stopped" in log
    assert "Traceback" not in log


async def test_a_port_that_is_taken_is_named_with_its_setting(config: str):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = await run("worker", "parser", "--port", str(port), TOKENBUS_CONFIG=config)
    assert ended.code == 2
    assert f"http.parser: 127.0.0.1:{port}: Address already in use" in ended.error
    assert "another `tokenbus up`" in ended.error


async def test_a_foreign_host_is_named(config: str):
    ended = await run("worker", "parser", "--host", "no.such.host.invalid", TOKENBUS_CONFIG=config)
    assert ended.code == 2
    assert "no.such.host.invalid" in ended.error


async def test_a_server_that_is_down_is_exit_code_3(config: str):
    with socket.socket() as silent:  # bound, so no other process can have it
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        ended = await run("worker", "fetcher", TOKENBUS_CONFIG=config, TOKENBUS_REDIS_URL=f"redis://127.0.0.1:{port}")
    assert ended.code == 3
    assert f"redis://127.0.0.1:{port} is unavailable" in ended.error


async def test_a_deployment_with_other_partitions_is_exit_code_3(server: Server, keys: Keys, config: str):
    await join_deployment(server, keys)
    ended = await run("worker", "normalizer", TOKENBUS_CONFIG=config, TOKENBUS_PARTITIONS="7")
    assert ended.code == 3
    assert "partitions is 7 here but 4 on the server" in ended.error


@asynccontextmanager
async def listener(reply: bytes) -> AsyncGenerator[str]:
    """A server that answers everything with this reply, or with nothing if it is empty. Its url."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while commands := (await reader.read(65_536)).count(b"*"):
            writer.write(reply * commands)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_server_that_is_too_old_is_exit_code_3(config: str):
    info = b"redis_version:5.0.14\r\nredis_mode:standalone"
    async with listener(b"$%d\r\n%s\r\n" % (len(info), info)) as url:
        ended = await run("worker", "tools", TOKENBUS_CONFIG=config, TOKENBUS_REDIS_URL=url)
    assert ended.code == 3
    assert "5.0.14" in ended.error


async def test_a_server_that_never_answers_is_given_up_within_seconds(config: str):
    async with listener(b"") as url, asyncio.timeout(120):
        ended = await run("worker", "parser", TOKENBUS_CONFIG=config, TOKENBUS_REDIS_URL=url)
    assert ended.code == 3
    assert url in ended.error


@pytest.mark.leaves_pending
async def test_the_first_signal_lets_a_run_finish_and_the_second_does_not(server: Server, keys: Keys, tmp_path: Path):
    async with MockProvider([SLOW]) as provider:
        url = server.url.safe
        config = settings_file(
            tmp_path,
            f'redis_url = "{url}"\nprefix = "{keys.prefix}"\npartitions = {keys.partitions}\nstages.drain_s = 3600\n'
            f'[providers.anthropic]\napi = "anthropic"\nbase_url = "{provider.url}"\napi_key_env = ""\n',
        )
        async with running(tmp_path / "err", "worker", "fetcher", TOKENBUS_CONFIG=config) as fetcher:
            page = (await fetcher.says("ready ")).split()[2]
            request = (
                b'{"type":"generate","provider":"anthropic","model":"slow","messages":[{"role":"user","content":"hi"}]}'
            )
            await server.client.xadd(keys.requests, {"__data__": request})
            await provider.requested()
            fetcher.process.terminate()
            await eventually(lambda: _leaves(page))
            assert fetcher.process.returncode is None, "it lets its run finish"
            fetcher.process.terminate()
            assert await fetcher.process.wait() == -15


async def _leaves(page: str) -> bool:
    async with httpx.AsyncClient(base_url=page) as http:
        return (await http.get("/ready")).status_code == 503
