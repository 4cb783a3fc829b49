"""Secrets planted in a deployment are searched for in all that it writes: every key of the server, logs, pages, blobs.

Provider and tools echo all that they were sent, which is what a wrong key's error, a proxy or a debugging page does.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import msgspec
import pytest
from redis.asyncio import Redis

from tests import fork_server
from tests.e2e.fleet import WITH_TOOLS, ended, fleet
from tests.security.hostile import telltale
from tests.servers import binary
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus_services.process.embedded_server import EmbeddedServer

PASSWORD = f"pw-{uuid4().hex}/+"
SECRETS = {
    "CHAT_KEY": f"sk-chat-{uuid4().hex}",
    "OTHER_KEY": f"sk-other-{uuid4().hex}",
    "BROKEN_KEY": f"sk-broken-{uuid4().hex}-é",
    "TOOL_TOKEN": f"tool-{uuid4().hex}",
}
TOOLS = ("small", "long", "binary", "refuses")
PROVIDERS = {
    "chat": ("CHAT_KEY", "{url}/v1"),
    "other": ("OTHER_KEY", "{url}/v1"),
    "broken": ("BROKEN_KEY", "{url}/v1"),
    "nobody": ("CHAT_KEY", "http://127.0.0.1:1/v1"),
}
SETTINGS = "[retry]\nbase_delay_s = 0.01\nmax_attempts = 2\n[records]\nsample = 1.0\n"


@pytest.fixture
async def locked() -> AsyncGenerator[tuple[str, Redis]]:
    """A server that asks for a password: its url, and a client."""
    with EmbeddedServer(binary=binary()) as server:
        async with Redis(port=server.port) as open_client:
            await open_client.config_set("requirepass", PASSWORD)
        async with Redis(port=server.port, password=PASSWORD) as client:
            yield f"redis://:{PASSWORD.replace('/', '%2F')}@127.0.0.1:{server.port}", client


def settings_for(url: str) -> str:
    tables = [
        f'[providers.{name}]\napi = "openai-chat"\nbase_url = "{base.format(url=url)}"\napi_key_env = "{variable}"\n'
        for name, (variable, base) in PROVIDERS.items()
    ]
    tables += [
        f'[tools.{name}]\nkind = "http"\nurl = "{url}/tool/{name}"\nallow_private = true\n'
        'header_env = { Authorization = "TOOL_TOKEN" }\n'
        for name in TOOLS
    ]
    return SETTINGS + "".join(tables)


async def test_no_secret_is_in_anything_that_a_deployment_writes(locked: tuple[str, Redis], tmp_path: Path) -> None:
    url, client = locked
    keys = Keys(prefix="leak", partitions=2)
    env = {**SECRETS, "TOKENBUS_LOG_LEVEL": "debug"}
    async with telltale() as hostile, fleet(tmp_path, url, keys, hostile, (), settings_for(hostile)) as blobs:
        [store] = await blobs.start("blobs", env=env)
        toml = f'{settings_for(hostile)}[blobs]\nservice_url = "{store.url}"\n'
        async with fleet(tmp_path, url, keys, hostile, (), toml) as others:
            workers = [store, *await others.start(*WITH_TOOLS, "recorder", env=env)]
            runs = [await put(client, keys, *request) for request in REQUEST]
            logs: Any = await ended(client, keys, runs)
            await eventually(lambda: all_recorded(client, keys, runs))
            pages = [text async for text in pages_of([worker.url for worker in workers])]
    for (provider, model), run in zip(REQUEST, runs, strict=True):
        assert (logs[run][-1]["type"] == "completed") == (provider == "chat" and model in COMPLETES), logs[run][-1]
    written = {f"key {name}": text async for name, text in everything(client)}
    written |= {f"file {path}": path.read_bytes() for path in files(tmp_path)}
    written |= {f"page {i}": page for i, page in enumerate(pages)}
    assert any(b"[redacted]" in text for name, text in written.items() if name.startswith("key")), "nothing was planted"
    assert any("blobs/sha256" in name for name in written), "no result went to the blob store"
    for secret in (*SECRETS.values(), PASSWORD):
        found = [name for name, text in written.items() if secret.encode() in text or secret[:-4].encode() in text]
        assert not found, f"{secret} is in {found}"


COMPLETES = ("chatty", "spells", "+".join(TOOLS))
REQUEST = [
    ("chat", "chatty"),
    ("chat", "spells"),
    ("chat", "unauthorized"),
    ("other", "unauthorized"),
    ("chat", "breaks"),
    ("chat", "+".join(TOOLS)),
    ("broken", "chatty"),
    ("nobody", "chatty"),
]


async def test_an_unusable_server_is_reported_without_its_password(tmp_path: Path, unused_port: int) -> None:
    password = f"pw-{uuid4().hex}"
    urls = (
        f"redis://ada:{password}@127.0.0.1:{unused_port}",
        f"redis://ada:{password}@127.0.0.1:99999",
        f"http://ada:{password}@127.0.0.1",
        f"redis://ada:{password}@[::1",
        f"rediss://ada:{password}@127.0.0.1:{unused_port}?ssl_ca_certs=/none&password={password}",
    )
    for output in await asyncio.gather(*(output_of("parser", url=url, directory=tmp_path) for url in urls)):
        assert output
        assert password not in output


async def test_a_wrong_password_is_reported_without_the_password(locked: tuple[str, Redis], tmp_path: Path) -> None:
    url = re.sub(":[^:]*@", ":not-the-password@", locked[0])
    output = await output_of("fetcher", url=url, directory=tmp_path)
    assert "invalid" in output
    assert "not-the-password" not in output
    assert PASSWORD not in output


async def put(client: Redis, keys: Keys, provider: str, model: str) -> str:
    run = f"run-{uuid4().hex[:12]}"
    tools = [{"name": name} for name in model.split("+")] if "+" in model else []
    request = {
        "type": "generate",
        "id": run,
        "provider": provider,
        "model": model,
        "messages": [{"role": "user", "content": "hello"}],
        "tools": tools,
    }
    await client.xadd(keys.requests, {"__data__": msgspec.json.encode(request)})
    return run


async def all_recorded(client: Any, keys: Keys, runs: list[str]) -> bool:
    return await client.zcard(keys.records) == len(runs)


async def everything(client: Any) -> AsyncIterator[tuple[str, bytes]]:
    """Each key's name and all that it holds."""
    async for name in client.scan_iter(count=1000):
        match await client.type(name):
            case b"string":
                value = await client.get(name)
            case b"hash":
                value = await client.hgetall(name)
            case b"stream":
                value = await client.xrange(name)
            case b"zset":
                value = await client.zrange(name, 0, -1)
            case other:
                raise AssertionError(f"a key of type {other}")
        yield name.decode(), b"\n".join(pieces_of(value))


def pieces_of(value: Any) -> Iterator[bytes]:
    if isinstance(value, bytes):
        yield value
    elif isinstance(value, dict):
        for pair in value.items():
            yield from pieces_of(pair)
    else:
        for piece in value:
            yield from pieces_of(piece)


def files(directory: Path) -> Iterator[Path]:
    """All but the settings, which contain the password."""
    return (path for path in directory.rglob("*") if path.is_file() and path.name != "tokenbus.toml")


async def pages_of(urls: list[str]) -> AsyncIterator[bytes]:
    async with httpx.AsyncClient(timeout=60) as http:
        for url in urls:
            for page in ("metrics", "asyncapi", "health", "ready"):
                answer = await http.get(f"{url}/{page}")
                assert answer.status_code == 200, answer.text
                yield answer.content


async def output_of(service: str, *, url: str, directory: Path) -> str:
    """The output of a worker that cannot start."""
    output = directory / f"output-{uuid4().hex}"
    env = {**os.environ, "TOKENBUS_REDIS_URL": url, "TOKENBUS_DATA": str(directory), "TOKENBUS_LOG_LEVEL": "debug"}
    process = fork_server.shared().start("worker", service, "--port", "0", env=env, stdout=output, stderr=output)
    assert await process.wait()
    return output.read_text()
