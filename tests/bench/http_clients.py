"""Minimal clients of an HTTP server that streams Chat Completions.

Each client reads the stamps in its answer, and records when each stamp arrived.
"""

from __future__ import annotations

import asyncio
import re
import time
from array import array
from collections.abc import Mapping, Sequence
from typing import cast
from urllib.parse import urlsplit

import msgspec

STAMP_CHARS = 19
_STAMP = re.compile(rb"(?<![0-9a-z])\d{%d}(?![0-9a-z])" % STAMP_CHARS)  # not inside an id
_HEAD_END = b"\r\n\r\n"


class Answer(asyncio.Protocol):
    def __init__(self, stamps: int) -> None:
        """``stamps``: the number of stamps in the answer; 0: wait only for the head of the answer."""
        self.sent, self.arrived = array("q"), array("q")
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stamps = stamps
        self._rest = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is not a subclass

    def ask(self, request: bytes) -> int:
        """Send the request; return the time, in nanoseconds of the monotonic clock."""
        assert self._transport
        began = time.monotonic_ns()
        self._transport.write(request)
        return began

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        data, end = self._rest + data, 0
        for found in _STAMP.finditer(data if self._stamps else b""):
            self.sent.append(int(found[0]))
            self.arrived.append(now)
            end = found.end()
        self._rest = data[max(end, len(data) - STAMP_CHARS - 1) :]
        enough = len(self.sent) >= self._stamps if self._stamps else _HEAD_END in data
        if enough and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError(f"closed after {len(self.sent)} of {self._stamps} stamps"))

    def close(self) -> None:
        assert self._transport
        self._transport.abort()


class Door(msgspec.Struct, frozen=True):
    """A server of Chat Completions."""

    url: str
    """Its base URL."""
    headers: Mapping[str, str] = {}
    """Of each request."""

    def chat(self, model: str) -> bytes:
        """A request for a streamed chat completion."""
        body = msgspec.json.encode(
            {"model": model, "stream": True, "messages": [{"role": "user", "content": "Hello."}]}
        )
        at = urlsplit(self.url)
        headers = {"host": at.netloc, "authorization": "Bearer sk-bench", "content-type": "application/json"}
        headers |= {**self.headers, "content-length": str(len(body))}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"POST {at.path}/chat/completions HTTP/1.1\r\n{lines}\r\n".encode() + body


def get(url: str) -> bytes:
    """A request for a stream."""
    at = urlsplit(url)
    return f"GET {at.path} HTTP/1.1\r\nhost: {at.netloc}\r\naccept: text/event-stream\r\n\r\n".encode()


async def connected(url: str, stamps: int) -> Answer:
    """A connection without a request."""
    at = urlsplit(url)
    assert at.hostname
    assert at.port
    _, answer = await asyncio.get_running_loop().create_connection(lambda: Answer(stamps), at.hostname, at.port)
    return answer


async def answers(
    door: Door, model: str, *, clients: int, stamps: int, stagger_s: float, timeout_s: float
) -> list[Answer]:
    """Run this many clients; each reads one answer with this many stamps. Raises TimeoutError, ConnectionError."""
    open_ = [await connected(door.url, stamps) for _ in range(clients)]
    try:
        async with asyncio.timeout(timeout_s):
            for answer in open_:
                answer.ask(door.chat(model))
                await asyncio.sleep(stagger_s)
            await asyncio.gather(*(answer.done for answer in open_))
    finally:
        for answer in open_:
            answer.close()
    return open_


async def first_chunk_ms(door: Door, model: str) -> float:
    """Time from the request to the first chunk of the answer, on an open connection."""
    answer = await connected(door.url, 1)
    try:
        async with asyncio.timeout(30):
            began = answer.ask(door.chat(model))
            await answer.done
            return (answer.arrived[0] - began) / 1e6
    finally:
        answer.close()


async def held(urls: Sequence[str]) -> list[Answer]:
    """Open a connection for each of these streams; return when each has received the head of its answer."""
    open_: list[Answer] = []
    for url in urls:
        answer = await connected(url, 0)
        answer.ask(get(url))
        open_.append(answer)
    async with asyncio.timeout(120):
        await asyncio.gather(*(answer.done for answer in open_))
    return open_
