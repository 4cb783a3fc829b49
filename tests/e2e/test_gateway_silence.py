"""Streams that are silent for long: each protocol's keep-alive, hundreds of them, and then the rest of the answer."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import httpx
import pytest

from tests.waiting import eventually
from tokenbus.testing import LocalBus, Reply, Stall, Turn

SILENCES = 200
"""Keep-alives in a row: 17 minutes at the default of 5 s."""
USER: Any = [{"role": "user", "content": "hello"}]
UI: Any = [{"id": "m", "role": "user", "parts": [{"type": "text", "text": "hello"}]}]
AGENT: Any = {"threadId": "t", "runId": "r", "tools": [], "context": [], "state": {}}
COMMENT = b": keep-alive\n\n"
CHAT: Any = {"model": "anthropic/stalls", "messages": USER, "stream": True}
ASKED: dict[str, tuple[str, Any, bytes, bytes]] = {
    "chat": ("/v1/chat/completions", CHAT, COMMENT, b"[DONE]"),
    "responses": ("/v1/responses", {"model": "anthropic/stalls", "input": "hello", "stream": True}, COMMENT, b"[DONE]"),
    "messages": (
        "/v1/messages",
        {**CHAT, "max_tokens": 99},
        b'event: ping\ndata: {"type": "ping"}\n\n',
        b"message_stop",
    ),
    "gemini": (
        "/v1beta/models/house:streamGenerateContent?alt=sse",
        {"contents": [{"role": "user", "parts": [{"text": "hello"}]}]},
        b"\n",
        b"finishReason",
    ),
    "ui": (
        "/api/chat",
        {"id": "c", "messages": UI, "trigger": "submit-message", "model": "anthropic/stalls"},
        COMMENT,
        b"[DONE]",
    ),
    "ag_ui": (
        "/agui",
        {
            **AGENT,
            "messages": [{"id": "m", "role": "user", "content": "hello"}],
            "forwardedProps": {"model": "anthropic/stalls"},
        },
        COMMENT,
        b"RUN_FINISHED",
    ),
}
"""For each protocol: the path, the body, its keep-alive, and what its last event has."""


@pytest.fixture(scope="module")
def bus() -> Generator[LocalBus]:
    settings = '[gateway]\nkeep_alive_s = 0.005\n[gateway.aliases]\nhouse = ["anthropic/stalls"]\n'
    with LocalBus(settings) as running:
        running.model_says("stalls", Turn(says=Reply(text="one two three four"), fault=Stall(after_text="two")))
        yield running


@pytest.mark.parametrize("name", ASKED)
async def test_a_silent_stream_is_kept_alive_in_its_own_dialect_and_then_goes_on(bus: LocalBus, name: str) -> None:
    path, body, keep_alive, end = ASKED[name]
    begun, heard, resumed = len(bus.exchanges), b"", False
    async with (
        httpx.AsyncClient(base_url=bus.gateway, timeout=120) as http,
        http.stream("POST", path, json=body) as answer,
    ):
        assert answer.status_code == 200
        async for data in answer.aiter_raw():
            heard += data
            if not resumed and b"two" in heard and keep_alive * SILENCES in heard:
                resumed = True
                await eventually(lambda: bus.exchanges[begun].state == "stalled")
                bus.resume(bus.exchanges[begun])
    assert resumed
    assert b"four" in heard
    assert end in heard
