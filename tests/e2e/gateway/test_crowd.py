"""Many live clients of every protocol while gateways are killed: the resumable ones get the identical rest from another
gateway, every other one gets an error, and none a silent end.

`make crowd CLIENTS=200` does it at length.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.e2e.fleet import PIPELINE, Fleet, Worker, fleet
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus_services.mock_provider import Delivery, MockProvider, Reply, Script, Turn

CLIENTS = int(os.environ.get("CLIENTS", "16"))
KILLS = 1 if CLIENTS < 50 else 5
PACE = 25.0 if CLIENTS < 50 else 8.0
TEXT = " ".join(f"word{n}" for n in range(60 if CLIENTS < 50 else 160))
WORDS = Script(name="words", turns=(Turn(says=Reply(text=TEXT), delivery=Delivery(pace=PACE)),))
SETTINGS = '[gateway]\nkeep_alive_s = 0.05\n[gateway.aliases]\nhouse = ["anthropic/words"]\n'
USER: Any = [{"role": "user", "content": "hello"}]
TRIES = 40


@pytest.fixture
async def provider() -> AsyncGenerator[MockProvider]:
    async with MockProvider([WORDS]) as running:
        yield running


@pytest.fixture
async def services(server_url: str, keys: Keys, tmp_path: Path, provider: MockProvider) -> AsyncGenerator[Fleet]:
    async with fleet(tmp_path, server_url, keys, provider.url, PIPELINE, SETTINGS) as running:
        yield running


class Crowd:
    """The gateways, and how one speaks to any that is alive."""

    def __init__(self, http: httpx.AsyncClient, gateways: list[Worker]) -> None:
        self.http = http
        self.gateways = gateways
        self.begun = 0
        """Clients that have received at least one event."""

    def url(self) -> str:
        """Some gateway, perhaps one that is being killed."""
        return random.choice(self.gateways).url

    async def json(self, method: str, path: str, body: Any = None) -> Any:
        """A short request, at another gateway if one is gone."""
        for _ in range(TRIES):
            try:
                return (await self.http.request(method, self.url() + path, json=body)).raise_for_status().json()
            except httpx.TransportError:
                await asyncio.sleep(0.05)
        raise AssertionError(f"no gateway took {method} {path}")

    async def read(self, received: list[bytes], method: str, path: str, body: Any = None, **headers: str) -> bool:
        """Read a stream from some gateway, and add its complete events. False: it broke off."""
        rest = b""
        fresh = True
        try:
            async with self.http.stream(method, self.url() + path, json=body, headers=headers) as answer:
                assert answer.status_code == 200, await answer.aread()
                async for data in answer.aiter_raw():
                    *events, rest = (rest + data).split(b"\n\n")
                    complete = [event for event in events if event.strip() and not _is_keep_alive(event)]
                    received += complete
                    self.begun += bool(complete and fresh)
                    fresh = fresh and not complete
        except httpx.TransportError:
            return False
        assert not rest.strip(), "an event was cut, and the end was clean"
        return True

    async def to_the_end(self, received: list[bytes], path: Callable[[list[bytes]], str], **headers: Any) -> bool:
        """Go on at other gateways until a stream ends cleanly. True if one broke before."""
        for n in range(TRIES):
            more = {name: of(received) for name, of in headers.items()}
            if await self.read(received, "GET", path(received), **more):
                return n > 0
            await asyncio.sleep(0.05)
        raise AssertionError("no gateway told the rest")


def _is_keep_alive(event: bytes) -> bool:
    return event.strip().startswith(b":") or event.strip().startswith(b"event: ping")


def _data(event: bytes) -> Any:
    return msgspec.json.decode(event.partition(b"data: ")[2])


# --- protocols without a resume: an error, or the whole answer --------------------------------------------------------


def foreground(path: str, end: bytes, body: dict[str, Any]) -> Callable[[Crowd, int], Coroutine[Any, Any, str]]:
    async def client(crowd: Crowd, number: int) -> str:
        received: list[bytes] = []
        if not await crowd.read(received, "POST", path, body):
            return "an error"
        assert end in received[-1], f"a silent end after {received[-1]!r}"
        return "whole"

    return client


# --- those with one: the identical rest -------------------------------------------------------------------------------


async def native(crowd: Crowd, number: int) -> str:
    run = (await crowd.json("POST", "/runs", {"model": "anthropic/words", "messages": USER}))["run"]
    received: list[bytes] = []

    def last(received: list[bytes]) -> str:
        return received[-1].partition(b"id: ")[2].partition(b"\n")[0].decode() if received else "-1"

    broke = await crowd.to_the_end(received, lambda _: f"/runs/{run}/events", **{"last-event-id": last})
    whole: list[bytes] = []
    await crowd.to_the_end(whole, lambda _: f"/runs/{run}/events")
    assert received == whole
    return "resumed" if broke else "whole"


async def responses(crowd: Crowd, number: int) -> str:
    body = {"model": "anthropic/words", "input": "hello", "background": True}
    name = (await crowd.json("POST", "/v1/responses", body))["id"]
    received: list[bytes] = []

    def after(received: list[bytes]) -> str:
        numbers = [_data(event)["sequence_number"] for event in received if b"sequence_number" in event]
        return f"/v1/responses/{name}?stream=true" + (f"&starting_after={numbers[-1]}" if numbers else "")

    broke = await crowd.to_the_end(received, after)
    whole: list[bytes] = []
    await crowd.to_the_end(whole, after)
    assert received == whole
    return "resumed" if broke else "whole"


async def ui(crowd: Crowd, number: int) -> str:
    chat = f"chat-{number}"
    messages = [{"id": "m", "role": "user", "parts": [{"type": "text", "text": "hello"}]}]
    body = {"id": chat, "messages": messages, "trigger": "submit-message", "model": "anthropic/words"}
    received: list[bytes] = []
    if await crowd.read(received, "POST", "/api/chat", body):
        assert received[-1] == b"data: [DONE]"
        return "whole"
    if not received:
        return "an error"  # perhaps it was never asked
    for _ in range(TRIES):
        replay: list[bytes] = []
        if await crowd.read(replay, "GET", f"/api/chat/{chat}/stream"):
            assert replay[: len(received)] == received
            assert replay[-1] == b"data: [DONE]"
            return "resumed"
        await asyncio.sleep(0.05)
    raise AssertionError("no gateway replayed the chat")


async def durable(crowd: Crowd, number: int) -> str:
    run = (await crowd.json("POST", "/runs", {"model": "anthropic/words", "messages": USER}))["run"]
    seqs, offset, broke, closed = list[int](), "-1", False, False
    while not closed:
        path = f"{crowd.url()}/v1/stream/{run}?offset={offset}&live=long-poll"
        try:
            page = await crowd.http.get(path)
        except httpx.TransportError:
            broke = True
            await asyncio.sleep(0.05)
            continue
        crowd.begun += not seqs
        seqs += [event["seq"] for event in page.json()] if page.status_code == 200 else []
        offset, closed = page.headers["stream-next-offset"], "stream-closed" in page.headers
    assert seqs == list(range(len(seqs)))
    return "resumed" if broke else "whole"


async def ag_ui(crowd: Crowd, number: int) -> str:
    body = {
        "threadId": f"t{number}",
        "runId": f"r{number}",
        "tools": [],
        "context": [],
        "state": {},
        "messages": [{"id": "m", "role": "user", "content": "hello"}],
        "forwardedProps": {"model": "anthropic/words"},
    }
    received: list[bytes] = []
    if await crowd.read(received, "POST", "/agui", body):
        assert b"RUN_FINISHED" in received[-1]
        return "whole"
    if not received:
        return "an error"
    for _ in range(TRIES):
        joined: list[bytes] = []
        if await crowd.read(joined, "GET", f"/agui/runs/r{number}"):
            assert b"RUN_FINISHED" in joined[-1]
            assert "".join(event.get("delta", "") for event in map(_data, joined)) in TEXT
            return "resumed"
        await asyncio.sleep(0.05)
    raise AssertionError("no gateway let the agent join")


GEMINI: Any = {"contents": [{"role": "user", "parts": [{"text": "hello"}]}]}
KINDS: dict[str, Callable[[Crowd, int], Coroutine[Any, Any, str]]] = {
    "chat": foreground(
        "/v1/chat/completions", b"[DONE]", {"model": "anthropic/words", "messages": USER, "stream": True}
    ),
    "messages": foreground(
        "/v1/messages",
        b"message_stop",
        {"model": "anthropic/words", "messages": USER, "stream": True, "max_tokens": 900},
    ),
    "gemini": foreground("/v1beta/models/house:streamGenerateContent?alt=sse", b"finishReason", GEMINI),
    "native": native,
    "responses": responses,
    "ui": ui,
    "durable": durable,
    "ag_ui": ag_ui,
}
RESUMABLE = {"native", "responses", "ui", "durable", "ag_ui"}


async def test_under_kills_of_gateways_no_client_of_any_protocol_has_a_silent_end(services: Fleet) -> None:
    gateways = await services.start("gateway", "gateway")
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=httpx.Timeout(120), limits=limits) as http:
        crowd = Crowd(http, gateways)
        kinds = [list(KINDS)[n % len(KINDS)] for n in range(CLIENTS)]
        clients = [asyncio.create_task(KINDS[kind](crowd, n), name=kind) for n, kind in enumerate(kinds)]
        await eventually(lambda: crowd.begun >= CLIENTS or any(client.done() for client in clients))
        for _ in range(KILLS):
            crowd.gateways[0].kill()
            (fresh,) = await services.start("gateway")
            crowd.gateways[:] = [*crowd.gateways[1:], fresh]
        ends = await asyncio.gather(*clients)
    outcomes = Counter(zip(kinds, ends, strict=True))
    print(sorted(outcomes.items()))
    assert {kind for kind, end in outcomes if end == "resumed"} <= RESUMABLE
    assert any(end == "resumed" for _, end in outcomes), outcomes
