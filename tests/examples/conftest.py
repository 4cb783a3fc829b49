"""A deployment as a newcomer has one: its own server, the usual key names, the mock provider, every service."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from tests.e2e.fleet import WITH_TOOLS, fleet
from tests.servers import binary
from tokenbus import Client
from tokenbus.bus.keys import Keys, SubscribedTopic
from tokenbus_services.mock_provider import MockProvider, Reply, Script, Stall, ToolCall, Turn
from tokenbus_services.process.embedded_server import EmbeddedServer

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"

SCRIPTS = (
    Script(name="tale", turns=(Turn(says=Reply(text="Dr. Grey came in. Nobody saw her! That was all.")),)),
    Script(
        name="thinks",
        turns=(Turn(says=Reply(thinking="a secret thought", text="Dr. Grey came in. Nobody saw her! That was all.")),),
    ),
    # It falls silent: only who stops it ends it.
    Script(
        name="fruit",
        turns=(Turn(says=Reply(text="apples, a kumquat, pears, plums", chunk_size=4), fault=Stall(after_text="ears")),),
    ),
    Script(name="strict", turns=(Turn(says=Reply(text="BLOCK: it is nobody's business")),) * 2),
    Script(
        name="asks",
        turns=(
            Turn(says=Reply(tool_calls=(ToolCall(id="t1", name="weather", arguments={"city": "Oslo"}),))),
            Turn(says=Reply(text="It is cold.")),
        ),
    ),
)


class Deployment:
    """What an example's process is given, and a client beside it."""

    def __init__(self, url: str, bus: Client, provider: MockProvider) -> None:
        self.bus = bus
        self.provider = provider
        self.env = {**os.environ, "TOKENBUS_REDIS_URL": url, "CHAT_PROVIDER": "anthropic", "CHAT_MODEL": "tale"}

    def request(self, model: str, **fields: object) -> Mapping[str, object]:
        return {"provider": "anthropic", "model": model, "messages": [{"role": "user", "content": "Go on."}], **fields}

    async def watches(self, topic: SubscribedTopic, group: str) -> bool:
        """Whether the group has a worker: from then on it misses nothing."""
        keys = Keys()
        leases = [keys.lease(partition, f"{topic}:{group}") for partition in range(keys.partitions)]
        return await self.bus._deployment.server.client.exists(*leases) == len(leases)

    @asynccontextmanager
    async def example(self, name: str, *arguments: str) -> AsyncGenerator[asyncio.StreamReader]:
        """An example as a process; what it prints."""
        async with self.process(sys.executable, str(EXAMPLES / f"{name}.py"), *arguments) as printed:
            yield printed

    @asynccontextmanager
    async def process(self, *command: str) -> AsyncGenerator[asyncio.StreamReader]:
        process = await asyncio.create_subprocess_exec(
            *command, env=self.env, cwd=EXAMPLES, stdout=asyncio.subprocess.PIPE
        )
        try:
            assert process.stdout
            yield process.stdout
            assert process.returncode is None, "it ended by itself"
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


@pytest.fixture
async def deployment(tmp_path: Path) -> AsyncGenerator[Deployment]:
    with EmbeddedServer(binary=binary()) as server:
        keys = Keys()
        async with (
            MockProvider(SCRIPTS) as provider,
            fleet(tmp_path, server.url, keys, provider.url, WITH_TOOLS),
            Client(server.url) as bus,
        ):
            yield Deployment(server.url, bus, provider)


def parsed(line: bytes) -> dict[str, object]:
    return msgspec.json.decode(line, type=dict[str, object])
