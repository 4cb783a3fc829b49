"""What end-to-end tests share."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest

from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server

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
