"""Scripts from a directory, and the server as a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec
import pytest

from tests.services.mock_provider.requests import CHAT, EVENTS, one_message, serving
from tokenbus_services.mock_provider import Reply, Script, Turn, load_scripts


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A script of each kind."""
    (tmp_path / "recorded.sse").write_bytes(EVENTS)
    (tmp_path / "many").mkdir()
    for number in range(2):
        (tmp_path / "many" / f"{number}.sse").write_bytes(b"data: turn %d\n\n" % number)
    (tmp_path / "whole.json").write_bytes(b'{"whole":1}')
    os.rename(tmp_path / "whole.json", tmp_path / "whole.body")
    recording = {"type": "recording", "stream": "recorded.sse", "body": "whole.body"}
    (tmp_path / "written.json").write_bytes(
        msgspec.json.encode({"turns": [{"says": recording, "delivery": {"cuts": {"type": "fixed", "size": 5}}}]})
    )
    composed = Script(name="by another name", turns=(Turn(says=Reply(text="hello {token}")),))
    (tmp_path / "composed.json").write_bytes(msgspec.json.encode(composed))
    return tmp_path


async def test_a_directory_gives_a_script_for_each_stream_directory_and_json_file(directory: Path) -> None:
    async with serving(*load_scripts(directory)) as (server, client):

        async def ask(model: str, *earlier: str, stream: bool = True) -> str:
            messages = [{"role": "user", "content": "a"}]
            for text in earlier:
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "and?"}]
            response = await client.post(CHAT, json=one_message(model=model, messages=messages, stream=stream))
            return response.text

        assert await ask("recorded") == EVENTS.decode()
        assert await ask("many") == "data: turn 0\n\n"
        assert await ask("many", "turn 0") == "data: turn 1\n\n"
        assert await ask("written") == EVENTS.decode()
        assert server.requests[-1].reads_sent == -(-len(EVENTS) // 5)
        assert await ask("written", stream=False) == '{"whole":1}'
        assert '"content":"hello a"' in await ask("by another name", stream=False)


def test_a_script_file_with_a_mistake_is_named(directory: Path) -> None:
    (directory / "broken.json").write_text('{"turns":[]}')
    with pytest.raises(ValueError, match=r"broken\.json: .*turns"):
        load_scripts(directory)


def test_two_scripts_of_one_name_are_refused(directory: Path) -> None:
    (directory / "many.sse").write_bytes(EVENTS)
    with pytest.raises(ValueError, match="many"):
        load_scripts(directory)


@asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[tuple[Process, str]]:
    """The server as a process, with its URL; killed if the test has not ended it."""
    command = ("-m", "tokenbus_services.mock_provider", *arguments)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = await asyncio.create_subprocess_exec(sys.executable, *command, stdin=PIPE, stdout=PIPE, env=env)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        yield child, (await child.stdout.readline()).decode().rstrip("\n")
    finally:
        if child.returncode is None:
            child.kill()
        child.stdin.close()
        await child.stdout.read()
        await child.wait()


async def test_as_a_process_it_prints_its_url_serves_and_ends_on_sigterm(directory: Path) -> None:
    async with process("--scripts", str(directory), "--rate", "1000") as (child, url):
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
            assert (await client.post(CHAT, json=one_message(model="recorded"))).content == EVENTS
        child.send_signal(signal.SIGTERM)
        assert await child.wait() == 0


async def test_as_a_process_it_serves_the_demo_and_ends_with_its_parent() -> None:
    async with process("--with-parent", "--rate", "0") as (child, url):
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
            assert "Zür" in (await client.post(CHAT, json=one_message(model="demo"))).text
        assert child.stdin is not None
        child.stdin.close()
        assert await child.wait() == 0


async def test_as_a_process_it_refuses_a_directory_that_is_not_there(tmp_path: Path) -> None:
    async with process("--scripts", str(tmp_path / "absent")) as (child, url):
        assert (await child.wait(), url) == (2, "")
