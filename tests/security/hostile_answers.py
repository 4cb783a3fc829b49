"""A provider that speaks Chat Completions and means harm: which harm, the request's model says."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

HEAD = "HTTP/1.1 {status}\r\ncontent-type: text/event-stream\r\nconnection: close\r\n{headers}\r\n"
PIECE = 64 * 1024
MB = 2**20
KEY = "kas-0123456789abcdef"
"""The key that it was sent."""


@asynccontextmanager
async def hostile_provider() -> AsyncGenerator[str]:
    serving: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        serving.add(task)
        try:
            await _serve(reader, writer)
        finally:
            serving.discard(task)
            writer.transport.abort()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError, asyncio.IncompleteReadError):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        model = json.loads(await reader.readexactly(length))["model"]
        async for piece in HARM[model]():
            writer.write(piece)
            await writer.drain()


def _head(status: str = "200 OK", *headers: str) -> bytes:
    return HEAD.format(status=status, headers="".join(f"{header}\r\n" for header in headers)).encode()


def _event(delta: object, finish: str | None = None) -> bytes:
    chunk = {"id": "x", "model": "m", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


HELLO = _event({"content": "hello"}) + _event({}, "stop") + b"data: [DONE]\n\n"


async def _doubly_compressed() -> AsyncIterator[bytes]:
    """1.3 KB that would be 700 MB."""
    yield _head("200 OK", "content-encoding: gzip, gzip")
    inner = gzip.compress(bytes(PIECE)) * (700 * MB // PIECE)
    yield gzip.compress(inner)


_BOMB = gzip.compress(bytes(64 * MB), 1)
_TEXT = gzip.compress(b"".join(b'data: {"choices":[],"about":"nothing, %d times"}\n\n' % n for n in range(20_000)))


async def _bomb() -> AsyncIterator[bytes]:
    yield _head("200 OK", "content-encoding: gzip") + _BOMB


async def _bomb_of_text() -> AsyncIterator[bytes]:
    """Within the ratio, and without an end."""
    yield _head("200 OK", "content-encoding: gzip")
    while True:
        yield _TEXT


async def _not_compressed() -> AsyncIterator[bytes]:
    yield _head("200 OK", "content-encoding: gzip") + HELLO


async def _endless_error() -> AsyncIterator[bytes]:
    yield _head("500 Oops")
    while True:
        yield b"x" * PIECE


async def _endless_headers() -> AsyncIterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\n"
    while True:
        yield b"".join(b"x-%d: %s\r\n" % (n, b"y" * 40) for n in range(1_000))


async def _many_headers() -> AsyncIterator[bytes]:
    yield _head("200 OK", *(f"x-{n}: y" for n in range(4_000))) + HELLO


async def _long_headers() -> AsyncIterator[bytes]:
    yield _head("400 No", f"x-request-id: {'z' * 30_000}", f"retry-after: {'9' * 5_000}")
    yield b"no"


async def _interim() -> AsyncIterator[bytes]:
    while True:
        yield b"HTTP/1.1 103 Early Hints\r\n\r\n" * 2_000


async def _wait_for_ever() -> AsyncIterator[bytes]:
    yield _head("429 Wait", "retry-after: 1e308") + b"{}"


async def _chunks_of_a_byte() -> AsyncIterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    text = _event({"content": "x" * 100_000}) + HELLO
    bytewise = b"".join(b"1\r\n%c\r\n" % byte for byte in text)
    for at in range(0, len(bytewise), PIECE):
        yield bytewise[at : at + PIECE]
    yield b"0\r\n\r\n"


async def _long_name() -> AsyncIterator[bytes]:
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "n" * 5 * MB, "arguments": "{}"}}
    yield _head() + _event({"tool_calls": [call]}) + _event({}, "tool_calls") + b"data: [DONE]\n\n"


async def _long_id() -> AsyncIterator[bytes]:
    call = {"index": 0, "id": "c" * 5 * MB, "type": "function", "function": {"name": "n", "arguments": "{}"}}
    yield _head() + _event({"tool_calls": [call]}) + _event({}, "tool_calls") + b"data: [DONE]\n\n"


async def _comments() -> AsyncIterator[bytes]:
    yield _head()
    while True:
        yield b": still here, and here, and here again\n" * 1_600


async def _endless_line() -> AsyncIterator[bytes]:
    yield _head() + b"data: "
    while True:
        yield b"x" * PIECE


async def _blank_lines() -> AsyncIterator[bytes]:
    yield _head()
    while True:
        yield b"\n" * PIECE


async def _beginnings_of_a_key() -> AsyncIterator[bytes]:
    """Thousands of texts, each under a key of its own, and each ends as the provider's key begins."""
    yield _head()
    event = 'data: {"choices":[],"odd%d":"a task","more":"%s"}\n\n'
    ends = [KEY[: 1 + n % 3] for n in range(130_000)]
    for at in range(0, len(ends), 1_000):
        yield "".join(event % (at + n, f"it is {end}") for n, end in enumerate(ends[at : at + 1_000])).encode()
    yield HELLO


HARM: dict[str, Callable[[], AsyncIterator[bytes]]] = {
    "doubly compressed": _doubly_compressed,
    "a bomb": _bomb,
    "a bomb of text": _bomb_of_text,
    "not compressed": _not_compressed,
    "an endless error": _endless_error,
    "endless headers": _endless_headers,
    "many headers": _many_headers,
    "long headers": _long_headers,
    "interim answers": _interim,
    "wait for ever": _wait_for_ever,
    "chunks of a byte": _chunks_of_a_byte,
    "a long name": _long_name,
    "a long id": _long_id,
    "comments": _comments,
    "an endless line": _endless_line,
    "blank lines": _blank_lines,
    "beginnings of a key": _beginnings_of_a_key,
}
