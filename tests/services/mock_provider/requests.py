"""A server with an httpx client of it, and requests as the provider APIs take them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from tokenbus_services.mock_provider import Delivery, MockProvider, Reply, Script, Turn, Wire
from tokenbus_services.mock_provider.script import Fault
from tokenbus_services.mock_provider.server import Choose

MESSAGES = "/v1/messages"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
GEMINI = "/v1beta/models/one-turn:streamGenerateContent"
INTERACTIONS = "/v1beta/interactions"

EVENTS = b"".join(b"event: e\ndata: %d\n\n" % number for number in range(12))
"""A body of twelve events."""


@asynccontextmanager
async def serving(
    *scripts: Script, choose: Choose | None = None, keep: int = 1_000
) -> AsyncIterator[tuple[MockProvider, httpx.AsyncClient]]:
    async with (
        MockProvider(scripts, choose=choose, keep=keep) as server,
        httpx.AsyncClient(
            base_url=server.url, headers={"anthropic-version": "2023-06-01"}, trust_env=False, timeout=20
        ) as client,
    ):
        yield server, client


def one_turn(
    says: Reply | Wire | None = None,
    *,
    delivery: Delivery | None = None,
    first: tuple[Fault | None, ...] = (),
    fault: Fault | None = None,
) -> Script:
    """A script `one-turn` of one turn, by default with the twelve events."""
    turn = Turn(says=says or Wire(stream=EVENTS), delivery=delivery or Delivery(), first=first, fault=fault)
    return Script(name="one-turn", turns=(turn,))


PATHS = (MESSAGES, CHAT, RESPONSES, GEMINI, INTERACTIONS)
"""One of each API, as `post` takes them."""


def post(path: str, text: str = "hello", *, model: str = "one-turn", stream: bool = True) -> dict[str, Any]:
    """A request of one user message to any of these APIs, as arguments of httpx's `post`."""
    if path in (RESPONSES, INTERACTIONS):
        return {"url": path, "json": {"model": model, "input": text, "stream": stream}}
    if path != GEMINI:
        return {"url": path, "json": one_message(text, model=model, stream=stream)}
    method = "streamGenerateContent?alt=sse" if stream else "generateContent"
    return {
        "url": f"/v1beta/models/{model}:{method}",
        "json": {"contents": [{"role": "user", "parts": [{"text": text}]}]},
    }


def one_message(text: str = "hello", **more: Any) -> dict[str, Any]:
    """A request of one user message, for Messages and Chat Completions alike."""
    return {
        "model": "one-turn",
        "max_tokens": 64,
        "stream": True,
        "messages": [{"role": "user", "content": text}],
        **more,
    }
