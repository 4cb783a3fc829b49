"""Gateways that die, stop or lose clients: no stream ends silently, and another gateway continues it to the byte."""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import openai
import pytest

from tests.e2e.fleet import PIPELINE, Fleet, Worker, fleet
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus_services.mock_provider import MockProvider, Reply, Script, Stall, Turn

STALLS = Script(name="stalls", turns=(Turn(says=Reply(text="one two three four"), fault=Stall(after_text="three")),))
SETTINGS = "[gateway]\nkeep_alive_s = 0.2\n[stages]\ndrain_s = 1.0\n"
USER: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def provider() -> AsyncGenerator[MockProvider]:
    async with MockProvider([STALLS]) as running:
        yield running


@pytest.fixture
async def services(
    server_url: str, keys: Keys, tmp_path: Path, provider: MockProvider
) -> AsyncGenerator[tuple[Fleet, Worker, Worker]]:
    async with fleet(tmp_path, server_url, keys, provider.url, PIPELINE, SETTINGS) as running:
        one, other = await running.start("gateway", "gateway")
        yield running, one, other


async def test_gateways_come_and_go_and_no_client_is_left_with_a_silent_end(
    services: tuple[Fleet, Worker, Worker], provider: MockProvider
) -> None:
    _, one, other = services
    async with (
        httpx.AsyncClient(base_url=one.url, timeout=60) as first,
        httpx.AsyncClient(base_url=other.url, timeout=60) as second,
        openai.AsyncOpenAI(api_key="k", base_url=f"{one.url}/v1", max_retries=0) as chat,
    ):
        # A client that resets its connection: the provider's socket closes.
        left = _raw_request(one.url, {"model": "anthropic/stalls", "messages": USER, "stream": True})
        exchange = await provider.requested()
        _reset(left)
        await eventually(lambda: exchange.state == "disconnected")

        # One that asked for the run to continue.
        kept = _raw_request(
            one.url,
            {"model": "anthropic/stalls", "messages": USER, "stream": True, "tokenbus": {"on_disconnect": "continue"}},
        )
        goes_on = await provider.requested(2)
        await eventually(lambda: goes_on.state == "stalled")
        _reset(kept)

        # A reader whose gateway is killed continues at another, to the byte; its chat gets an error.
        run = (await first.post("/runs", json={"model": "anthropic/stalls", "messages": USER})).json()["run"]
        stalled = await provider.requested(3)
        stream = await chat.chat.completions.create(model="anthropic/stalls", messages=USER, stream=True)
        assert (await anext(stream)).choices[0].delta.role == "assistant"
        received = b""
        with pytest.raises(httpx.RemoteProtocolError):  # noqa: PT012 (what came before the error counts)
            async with first.stream("GET", f"/runs/{run}/events") as events:
                async for data in events.aiter_raw():
                    received += data
                    if b"one" in received:
                        one.kill()
        with pytest.raises(openai.APIConnectionError):
            async for _ in stream:
                pass
        provider.resume(stalled)
        received = received.replace(b": \n\n", b"")
        last = received.rpartition(b"id: ")[2].partition(b"\n")[0].decode()
        rest = (await second.get(f"/runs/{run}/events", headers={"last-event-id": last})).content
        whole = (await second.get(f"/runs/{run}/events")).content.replace(b": \n\n", b"")
        assert received + rest.replace(b": \n\n", b"") == whole
        assert b"event: completed" in rest
        assert goes_on.state == "stalled", "its client disconnected, and it continues as requested"

        # A gateway that stops ends its streams with an error; the run continues.
        async with openai.AsyncOpenAI(api_key="k", base_url=f"{other.url}/v1", max_retries=0) as again:
            raw = await again.chat.completions.with_raw_response.create(
                model="anthropic/stalls", messages=USER, stream=True
            )
            other.process.terminate()
            with pytest.raises(openai.APIError) as caught:
                async for _ in raw.parse():
                    pass
            assert caught.value.code == "gateway_restarting"
            assert raw.headers["x-tokenbus-run"] in caught.value.message
        assert await other.process.wait() == 0
        assert "Traceback" not in other.log.read_text()


def _raw_request(url: str, body: object) -> socket.socket:
    """A request on a socket of its own, of which nothing is read yet."""
    at = urlsplit(url)
    assert at.hostname
    assert at.port
    data = msgspec.json.encode(body)
    sock = socket.create_connection((at.hostname, at.port), timeout=60)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {at.netloc}\r\ncontent-length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)
    return sock


def _reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
