"""What end-to-end tests share."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import pytest

from tests.e2e.fleet import Fleet, Kind, fleet
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import MockProvider, Script

WEATHER = {
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}

Send = Callable[..., Any]


def sender(server: Server, keys: Keys) -> Send:
    """Puts a request on the inbound stream as any program would, and returns the id of its run."""

    async def put(model: str, text: str = "hello", *, provider: str = "anthropic", **fields: Any) -> str:
        run = fields.pop("id", None) or f"run-{uuid4().hex[:12]}"
        request = {
            "type": "generate",
            "id": run,
            "provider": provider,
            "model": model,
            "messages": [{"role": "user", "content": text}],
            **fields,
        }
        await server.client.xadd(keys.requests, {"__data__": json.dumps(request)})
        return run

    return put


@pytest.fixture
def send(server: Server, keys: Keys) -> Send:
    """The `sender` of the test's deployment."""
    return sender(server, keys)


class Deploy(Protocol):
    """Runs a mock provider with these scripts, and these workers; leaving it stops both."""

    def __call__(
        self, scripts: Iterable[Script], kinds: Sequence[Kind], toml: str = ""
    ) -> AbstractAsyncContextManager[tuple[MockProvider, Fleet]]: ...


@pytest.fixture
def deployed(tmp_path: Path, server_url: str, keys: Keys) -> Deploy:
    @asynccontextmanager
    async def deploy(
        scripts: Iterable[Script], kinds: Sequence[Kind], toml: str = ""
    ) -> AsyncGenerator[tuple[MockProvider, Fleet]]:
        async with (
            MockProvider(scripts) as provider,
            fleet(tmp_path, server_url, keys, provider.url, kinds, toml) as services,
        ):
            yield provider, services

    return deploy
