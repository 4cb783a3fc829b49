"""`tokenbus up` as a process: it brings all up, keeps all up, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
from pathlib import Path

import pytest
import redis.asyncio

from tests.services.cli.process import Command, descendants, environment, run, running, settings_file
from tests.waiting import eventually
from tokenbus.client.blobs import Blobs
from tokenbus.errors import BlobUnavailable
from tokenbus_services.blobs.client import HttpBlobs
from tokenbus_services.settings import BlobSettings

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the children in /proc")


def pid_of(directory: Path, command: str) -> int:
    """The one child that runs this command, guards left out."""
    found = [p for p, line in descendants(directory).items() if command in line and "guard.py" not in line]
    assert len(found) == 1, found
    return found[0]


def all_gone(directory: Path) -> bool:
    left = descendants(directory)
    assert not left, left
    return True


async def redis_url(up: Command) -> str:
    return (await up.says("server ")).split()[1]


NEWCOMER = """
import asyncio
from tokenbus import Client

async def main():
    async with Client() as bus:
        request = {"provider": "mock-gemini", "model": "any", "messages": [{"role": "user", "content": "Hello!"}]}
        print((await (await bus.publish(request)).result()).text)

asyncio.run(main())
"""


async def test_with_the_mock_provider_up_brings_all_up_a_newcomer_sees_words_without_a_key_a_url_or_a_flag_and_all_stop(
    tmp_path: Path,
):
    config = settings_file(tmp_path)
    env = {"TOKENBUS_CONFIG": config, "TOKENBUS_DATA": str(tmp_path / "data")}
    async with running(tmp_path / "err", "up", "--mock", "--scale", "parser=2", **env) as up:
        while up.seen[-1:] != ["ready"]:
            await up.says("ready")
        urls = {line.split()[1]: line.split()[2] for line in up.seen if line.startswith("ready ")}
        services = {"fetcher", "normalizer", "parser-1", "parser-2", "tools", "blobs", "gateway"}
        assert urls.keys() == services | {"mock-provider"}
        assert urls["mock-provider"].startswith("http://127.0.0.1:")
        assert any(re.fullmatch(r"console http://127\.0\.0\.1:\d+/console/", line) for line in up.seen)

        async def shared_out() -> bool:
            findings = {f["about"]: f for f in json.loads((await run("doctor", "--json", **env)).out)}
            return findings["parser"]["says"].startswith("2 at work, all 8 partitions owned")  # found by its directory

        await eventually(shared_out)  # the second parser takes its half over once both are ready

        second = await run("up", **env)
        assert second.code == 2
        assert f"process {up.process.pid} runs" in second.error

        sent = await run("send", **env)
        assert (sent.code, "umbrella" in sent.out, "[tool result weather]" in sent.out) == (0, True, True), sent.err
        output = await run("send", "--text", "Anything?", "--follow", **env)
        assert "You wrote: “Anything?”" in output.out
        of_gemini = await run("send", "--provider", "mock-gemini", "--follow", **env)
        assert "umbrella" in of_gemini.out, "a mock provider's missing options are the demo's"
        refused = await run("send", "--provider", "nope", "--model", "m", "--text", "t", **env)
        assert (refused.code, refused.out, "nope: not configured" in refused.error) == (5, "", True), refused

        client = await asyncio.create_subprocess_exec(
            sys.executable, "-c", NEWCOMER, env=environment(**env), stdout=asyncio.subprocess.PIPE
        )
        assert "You wrote: “Hello!”" in (await client.communicate())[0].decode()

        first = pid_of(tmp_path, "tokenbus_services.mock_provider")
        os.kill(first, signal.SIGKILL)
        await up.says("died mock-provider")
        await up.says("ready mock-provider")
        assert (await run("send", "--text", "Again?", "--follow", **env)).code == 0, "at the same address"

        assert await up.stop() == 0
        await up.says("stopping")
    assert all_gone(tmp_path)
    log = up.log.read_text()
    stopped = [name for line in log.splitlines() if '"stopped"' in line and (name := line.split(" ")[0]) in services]
    assert stopped[-1] == "blobs"
    assert stopped.index("fetcher") < min(stopped.index(name) for name in ("normalizer", "parser-1", "parser-2"))
    assert "Traceback" not in log

    after = await run("send", **env)
    assert after.code == 2
    assert "up --mock" in after.error


async def test_up_chained_runs_one_process_for_fetcher_normalizer_and_parser(tmp_path: Path):
    config = settings_file(tmp_path, "[gateway]\n[records]\n")
    env = {"TOKENBUS_CONFIG": config, "TOKENBUS_DATA": str(tmp_path / "data")}
    async with running(tmp_path / "err", "up", "--chained", **env) as up:
        while not up.seen or up.seen[-1] != "ready":
            await up.says("ready")
        names = {line.split()[1] for line in up.seen if line.startswith("ready ")}
        assert names == {"pipeline", "blobs", "recorder", "gateway"}
        findings = {f["about"]: f for f in json.loads((await run("doctor", "--json", **env)).out)}
        for about in ("pipeline", "gateway", "recorder"):
            assert findings[about]["says"].startswith("1 at work")
        once = (await run("top", "--once", "--every", "0.1", **env)).out
        assert "pipelines 1  gateways 1" in once
        assert "recorder" in once
        assert findings["tools"]["level"] == "ok"  # there are none to run
        for about in ("intake", "fetcher", "normalizer", "parser"):
            assert findings[about]["level"] == "ok"
            assert findings[about]["says"].startswith("1 at work")
        assert await up.stop() == 0
    assert all_gone(tmp_path)


async def test_any_free_port_of_the_blob_service_reaches_services_and_clients_and_no_strangers_service_is_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)  # where `TOKENBUS_DATA` is relative to, for the client below
    loader = 'def loader():\n    raise RuntimeError("the loader beside the settings was imported")\n'
    (tmp_path / "mine.py").write_text(loader)
    config = settings_file(tmp_path)
    env = {"TOKENBUS_CONFIG": config, "TOKENBUS_DATA": str(tmp_path / "data")}
    async with running(tmp_path / "err", "up", "--services", "blobs", **env) as up:
        await up.says("ready blobs")
        url = up.seen[-1].split()[2]
        findings = {f["about"]: f for f in json.loads((await run("doctor", "--json", **env)).out)}
        assert findings["blobs"] == {"level": "ok", "about": "blobs", "says": f"answers at {url}"}
        monkeypatch.setenv("TOKENBUS_DATA", str(tmp_path / "data"))
        monkeypatch.delenv("TOKENBUS_BLOBS_URL", raising=False)
        ref = await Blobs().put(b"from a client without a url")
        assert await Blobs(url).get(ref.blob_id) == b"from a client without a url"

        settings = BlobSettings(service_url=url)
        async with HttpBlobs.from_settings(settings, {"TOKENBUS_DEPLOYMENT": "another"}) as blobs:
            for call in (blobs.load, blobs.head, blobs.lease):
                with pytest.raises(BlobUnavailable, match="not the blob service of this deployment"):
                    await call(ref.blob_id)
        other = {**env, "TOKENBUS_DATA": str(tmp_path / "other"), "TOKENBUS_BLOBS_URL": url}
        ask_another = await run(
            "doctor", "--json", **other, TOKENBUS_DEPLOYMENT="another", TOKENBUS_REDIS_URL="redis://127.0.0.1:1"
        )
        [wrong] = [f for f in json.loads(ask_another.out) if f["about"] == "blobs"]
        assert (wrong["level"], wrong["says"]) == (
            "wrong",
            f"{url}: what answers there is the blob service of another deployment",
        )
        mine = settings_file(tmp_path, '[blobs]\nloader = "mine:loader"\n')
        found = json.loads(
            (await run("doctor", "--json", TOKENBUS_CONFIG=mine, TOKENBUS_REDIS_URL="redis://127.0.0.1:1")).out
        )
        [imported] = [f["says"] for f in found if f["about"] == "blobs"]
        assert "the loader beside the settings was imported" in imported


def environ_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


async def test_what_dies_is_started_again_and_no_stage_gets_a_providers_key(tmp_path: Path):
    config = settings_file(tmp_path, '[providers.p]\napi = "anthropic"\napi_key_env = "P_KEY"\n')
    env = {"TOKENBUS_CONFIG": config, "TOKENBUS_DATA": str(tmp_path / "data"), "P_KEY": "sk-of-this-test"}
    async with running(tmp_path / "err", "up", "--services", "normalizer", **env) as up:
        url = await redis_url(up)
        await up.says("ready normalizer")
        first = pid_of(tmp_path, "worker normalizer")
        assert b"sk-of-this-test" in environ_of(up.process.pid)
        assert b"sk-of-this-test" not in environ_of(first)
        os.kill(first, signal.SIGKILL)
        assert "was ended by SIGKILL; starting again in 0.25 s" in await up.says("died normalizer")
        await up.says("ready normalizer")
        second = pid_of(tmp_path, "worker normalizer")
        assert second != first
        assert b"sk-of-this-test" not in environ_of(second)

        async with redis.asyncio.Redis.from_url(url) as client:
            await client.set("kept", "yes")
        os.kill(pid_of(tmp_path, f"-server 127.0.0.1:{url.rpartition(chr(58))[2]}"), signal.SIGKILL)
        assert (await up.says("ready server")).endswith(url), "where it was"
        async with redis.asyncio.Redis.from_url(url) as client:
            assert await client.get("kept") == b"yes"
        assert await up.stop(signal.SIGINT) == 0
    assert all_gone(tmp_path)


async def test_children_end_with_up_however_it_ends(tmp_path: Path):
    env = {"TOKENBUS_CONFIG": settings_file(tmp_path), "TOKENBUS_DATA": str(tmp_path / "data")}
    async with running(tmp_path / "err", "up", "--services", "parser,blobs", **env) as up:
        await up.says("ready parser")
        up.process.kill()
    await eventually(lambda: all_gone(tmp_path))


async def test_a_service_that_is_set_up_wrongly_ends_all_with_its_error(tmp_path: Path):
    config = settings_file(tmp_path, '[tools.broken]\nkind = "python"\ncall = "no_such_module:function"')
    data = str(tmp_path / "data")
    ended = await run("up", "--services", "tools,blobs", TOKENBUS_CONFIG=config, TOKENBUS_DATA=data)
    assert ended.code == 2
    assert ended.err.splitlines()[-1].startswith("error: tools ended with exit code 2: ")
    assert "no_such_module" in ended.err.splitlines()[-1]
    assert all_gone(tmp_path)


async def test_ports_in_use_are_one_error_before_anything_starts(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        ports = {"parser": one.getsockname()[1], "gateway": two.getsockname()[1]}
        config = settings_file(tmp_path, "[gateway]\n", **ports)
        ended = await run("up", TOKENBUS_CONFIG=config, TOKENBUS_DATA=str(tmp_path / "data"))
    assert (ended.code, ended.out, len(ended.error.splitlines())) == (2, "", 1), ended
    assert all(f"{port} ({service})" in ended.error for service, port in ports.items())
    assert not (tmp_path / "data").exists()


async def test_a_server_that_is_down_is_waited_for(tmp_path: Path):
    config = settings_file(tmp_path)
    env = {"TOKENBUS_CONFIG": config, "TOKENBUS_DATA": str(tmp_path / "data")}
    url = "redis://127.0.0.1:1"
    async with running(tmp_path / "err", "up", "--services", "parser", TOKENBUS_REDIS_URL=url, **env) as up:
        for pause in ("0.25", "0.5", "1"):
            assert f"exit code 3; starting again in {pause} s" in await up.says("died parser")
        async with asyncio.timeout(60):
            assert await up.stop() == 0
    assert f"parser | error: server {url} is unavailable" in up.log.read_text()
