"""A client of the gateway disconnects: the time until the provider sees its socket closed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import urlsplit
from uuid import uuid4

import msgspec
from websockets.asyncio.client import ClientConnection, connect

from tests.bench.figures import Figure
from tests.bench.sections.cancel import BETWEEN_S, MOST_MS, PACE, WORDS
from tests.bench.stack import SERVICES, running
from tokenbus_services.mock_provider import Delivery, MockProvider, Reply, Script, Turn
from tokenbus_services.process.embedded_server import free_port

CLIENTS = 16
"""Clients of one protocol; all of them read while they disconnect one after the other."""
ROUNDS = 4
GATEWAY = "gateway"
_ENDLESS = Script(name="endless", turns=(Turn(says=Reply(text="word " * WORDS), delivery=Delivery(pace=PACE)),))
Json = dict[str, Any]


def _said(text: str) -> list[Json]:
    return [{"role": "user", "content": text}]


PROTOCOLS: dict[str, tuple[str, Callable[[str], Json]]] = {
    "Chat Completions": (
        "/v1/chat/completions",
        lambda text: {"model": "held/endless", "stream": True, "messages": _said(text)},
    ),
    "Responses": ("/v1/responses", lambda text: {"model": "held/endless", "stream": True, "input": text}),
    "Messages": (
        "/v1/messages",
        lambda text: {"model": "held/endless", "stream": True, "max_tokens": 9_000, "messages": _said(text)},
    ),
    "Gemini": (
        "/v1beta/models/endless:streamGenerateContent?alt=sse",
        lambda text: {"contents": [{"role": "user", "parts": [{"text": text}]}]},
    ),
}
"""The protocols whose disconnect ends the run, with the path and the body of a request."""
WEBSOCKET = "Responses, WebSocket"


def left() -> list[Figure]:
    """Start the services, disconnect clients of each protocol, and read the times from the provider."""
    port = free_port()
    settings = (
        f'[providers.held]\napi = "anthropic"\nbase_url = "http://127.0.0.1:{port}"\napi_key_env = ""\n'
        '[gateway.aliases]\nendless = ["held/endless"]\n'
    )
    with running([], services=(*SERVICES, GATEWAY), settings=settings) as stack:
        times = asyncio.run(_measure(stack.urls[GATEWAY], port))
    return [figure for protocol, found in times.items() for figure in _figures(protocol, sorted(found))]


def _figures(protocol: str, times: list[float]) -> list[Figure]:
    p50, p99 = (times[int(share * len(times))] for share in (0.5, 0.99))
    name = f"disconnect to the provider's socket, {protocol}"
    return [
        Figure(name=f"{name}, p50", unit="ms", value=p50),
        Figure(name=f"{name}, p99", unit="ms", value=p99, aim=f"≤ {MOST_MS:g} ms", met=p99 <= MOST_MS),
    ]


async def _measure(url: str, port: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in (*PROTOCOLS, WEBSOCKET)}
    async with MockProvider([_ENDLESS], port=port) as provider:
        for _ in range(ROUNDS):
            for protocol in times:
                times[protocol] += await _all_go(url, protocol, provider)
    return times


async def _all_go(url: str, protocol: str, provider: MockProvider) -> list[float]:
    """One round. The provider identifies its runs by the user's text."""
    clients = {f"bench-{uuid4().hex}": await _connected(url, protocol) for _ in range(CLIENTS)}
    for text, client in clients.items():
        await client.ask(text)

    def streaming() -> bool:
        reading = [e for e in provider.requests if e.request and e.request.user_text in clients]
        return sum(e.reads_sent > PACE / 5 for e in reading) >= CLIENTS

    await provider.until(streaming)
    await asyncio.gather(*(client.is_streaming.wait() for client in clients.values()))
    exchanges = {e.request.user_text: e for e in provider.requests if e.request}
    began: dict[str, float] = {}
    for text, client in clients.items():
        began[text] = time.monotonic()
        client.go()
        await asyncio.sleep(BETWEEN_S)
    return [(await provider.disconnected(exchanges[text]) - began[text]) * 1000 for text in clients]


class _Reader(asyncio.Protocol):
    """A client of a stream over HTTP."""

    def __init__(self, url: str, protocol: str) -> None:
        self.is_streaming = asyncio.Event()
        self._at = urlsplit(url)
        self._path, self._body = PROTOCOLS[protocol]
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if b"word" in data:
            self.is_streaming.set()

    async def ask(self, text: str) -> None:
        assert self._transport
        body = msgspec.json.encode(self._body(text))
        head = (
            f"POST {self._path} HTTP/1.1\r\nhost: {self._at.netloc}\r\nauthorization: Bearer sk-bench\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self._transport.write(head.encode() + body)

    def go(self) -> None:
        assert self._transport
        self._transport.abort()


class _SocketReader:
    """A client of the Responses API over a WebSocket."""

    def __init__(self, connection: ClientConnection) -> None:
        self.is_streaming = asyncio.Event()
        self._connection = connection
        self._reading = asyncio.create_task(self._read(), name="reader of a socket")

    async def ask(self, text: str) -> None:
        frame: Json = {"type": "response.create", "model": "held/endless", "input": text}
        await self._connection.send(msgspec.json.encode(frame).decode())

    def go(self) -> None:
        self._reading.cancel()
        self._connection.transport.abort()

    async def _read(self) -> None:
        async for frame in self._connection:
            if "word" in str(frame):
                self.is_streaming.set()


async def _connected(url: str, protocol: str) -> _Reader | _SocketReader:
    if protocol == WEBSOCKET:
        return _SocketReader(await connect(url.replace("http", "ws", 1) + "/v1/responses"))
    at = urlsplit(url)
    assert at.hostname
    assert at.port
    _, reader = await asyncio.get_running_loop().create_connection(lambda: _Reader(url, protocol), at.hostname, at.port)
    return reader
