"""Streams of every protocol: keep-alives in the protocol's form during a long silence, and no discarded call."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import httpx
import msgspec
import pytest

from tests.waiting import eventually
from tokenbus.testing import ErrorEvent, LocalBus, Reply, Stall, ToolCall, Turn

SILENCES = 200
"""Keep-alives in a row: 17 minutes at the default of 5 s."""
USER: Any = [{"role": "user", "content": "hello"}]
UI: Any = [{"id": "m", "role": "user", "parts": [{"type": "text", "text": "hello"}]}]
AGENT: Any = {"threadId": "t", "runId": "r", "tools": [], "context": [], "state": {}}
COMMENT = b": keep-alive\n\n"
CHAT: Any = {"model": "anthropic/stalls", "messages": USER, "stream": True}
REQUEST: dict[str, tuple[str, Any, bytes, bytes]] = {
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
    aliases = '[gateway.aliases]\nhouse = ["anthropic/stalls"]\nvoided = ["anthropic/voided"]\n'
    settings = f"[gateway]\nkeep_alive_s = 0.005\n{aliases}"
    with LocalBus(settings) as running:
        running.model_says("stalls", Turn(says=Reply(text="one two three four"), fault=Stall(after_text="two")))
        call = ToolCall(name="place", arguments={"of": "Ann"})
        reply = Reply(thinking="Hm.", tool_calls=(call,))
        running.model_says("voided", Turn(says=reply, first=(ErrorEvent(after_text="Ann"),)))
        yield running


@pytest.mark.parametrize("name", REQUEST)
async def test_a_silent_stream_is_kept_alive_in_its_protocol_and_then_continues(bus: LocalBus, name: str) -> None:
    path, body, keep_alive, end = REQUEST[name]
    begun, received, resumed = len(bus.exchanges), b"", False
    async with (
        httpx.AsyncClient(base_url=bus.gateway, timeout=120) as http,
        http.stream("POST", path, json=body) as answer,
    ):
        assert answer.status_code == 200
        async for data in answer.aiter_raw():
            received += data
            if not resumed and b"two" in received and keep_alive * SILENCES in received:
                resumed = True
                await eventually(lambda: bus.exchanges[begun].state == "stalled")
                bus.resume(bus.exchanges[begun])
    assert resumed
    assert b"four" in received
    assert end in received


TOOL: Any = {"name": "place", "parameters": {"type": "object"}}
CALLS: dict[str, tuple[str, Any, bytes]] = {
    "chat": (
        "/v1/chat/completions",
        {**CHAT, "model": "anthropic/voided", "tools": [{"type": "function", "function": TOOL}]},
        b'"name":"place"',
    ),
    "responses": (
        "/v1/responses",
        {"model": "anthropic/voided", "input": "hello", "stream": True, "tools": [{"type": "function", **TOOL}]},
        b"event: response.function_call_arguments.done",
    ),
    "messages": (
        "/v1/messages",
        {
            **CHAT,
            "model": "anthropic/voided",
            "max_tokens": 99,
            "tools": [{"name": "place", "input_schema": {"type": "object"}}],
        },
        b'"type":"tool_use"',
    ),
    "gemini": (
        "/v1beta/models/voided:streamGenerateContent?alt=sse",
        {
            "contents": [{"role": "user", "parts": [{"text": "hello"}]}],
            "tools": [{"functionDeclarations": [{"name": "place"}]}],
        },
        b'"functionCall"',
    ),
}
"""For each protocol that cannot take a call back: the path, the body, and what it says once for each call."""


@pytest.mark.parametrize("name", CALLS)
async def test_a_call_of_a_failed_attempt_is_never_sent(bus: LocalBus, name: str) -> None:
    path, body, mark = CALLS[name]
    begun = len(bus.exchanges)
    content = msgspec.json.encode(body).replace(b'"hello"', b'"hello, %b"' % name.encode())  # a conversation of its own
    async with httpx.AsyncClient(base_url=bus.gateway, timeout=120) as http:
        headers = {"x-tokenbus-on-failure": "before_first_visible"}
        answer = (await http.post(path, content=content, headers=headers)).content
    assert len(bus.exchanges) == begun + 2, answer
    assert answer.count(mark) == 1, answer
