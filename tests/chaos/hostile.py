"""A hostile provider: each run gets one kind of attack. The run must end and must not affect other runs."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from functools import cache
from typing import Any

import msgspec

from tests.chaos.record import Story

APIS = ("anthropic", "openai-chat", "gemini")
NAMES = {api: f"hostile-{api}" for api in APIS}
"""The providers' names, by API."""
_BOMB_BYTES = 256 * 2**20
_PIECE = 64 * 2**10
_LONG_S = 30.0
"""Endless attacks stop after this many seconds; reaching it is the client's fault."""
LONGEST_S = 12.0
"""Seconds until a run must have found that no usable answer will come."""
PATIENCE = "progress_timeout_s = 4.0\ncall_timeout_s = 8.0"
"""Further settings of a hostile provider: how long a call may last without progress, and in all."""
HUGE_LONGEST_S = 30.0
"""Seconds until a request that is too large must have ended."""
_HUGE_PIECE = 2**20
_DRIP_S = 0.2
_MODEL_IN_PATH = re.compile(rb"models/(\w+):")
_PARTS = 100_000
_OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n"

Send = Callable[[bytes], Any]


@cache
def _bomb(times: int) -> bytes:
    data = gzip.compress(bytes(_BOMB_BYTES), 9)
    for _ in range(times - 1):
        data = gzip.compress(data, 9)
    return data


async def gzip_bomb(send: Send) -> None:
    """A small body that becomes a quarter of a gigabyte."""
    await send(_OK + b"content-encoding: gzip\r\n\r\n" + _bomb(1))


async def gzip_bomb_in_a_bomb(send: Send) -> None:
    """A compressed body inside a compressed body."""
    await send(_OK + b"content-encoding: gzip, gzip\r\n\r\n" + _bomb(2))


async def bomb_as_an_error(send: Send) -> None:
    """An error response whose body is a bomb: clients read it too."""
    await send(b"HTTP/1.1 500 Oh\r\nconnection: close\r\ncontent-encoding: gzip\r\n\r\n" + _bomb(1))


async def wrong_encoding(send: Send) -> None:
    """A body that is not in the announced encoding."""
    await send(_OK + b"content-encoding: gzip\r\n\r\n" + b"event: ping\ndata: {}\n\n" * 10)


async def unknown_encoding(send: Send) -> None:
    """A content encoding that no client supports."""
    await send(_OK + b"content-encoding: snail\r\n\r\n" + b"data: {}\n\n")


async def no_utf8(send: Send) -> None:
    """Bytes that are not UTF-8."""
    await send(_OK + b'\r\nevent: message_start\ndata: {"type":"message_start","message":{"id":"\xff\xfe\xc0"}}\n\n')


async def endless_comments(send: Send) -> None:
    """A stream of comments without an event."""
    await send(_OK + b"\r\n")
    while True:  # in large pieces: small ones would take too long in this process
        await send(b": " + b"x" * _PIECE + b"\n\n")
        await asyncio.sleep(0.01)


async def endless_line(send: Send) -> None:
    """An event that never ends."""
    await send(_OK + b"\r\ndata: ")
    while True:
        await send(b"x" * _PIECE)
        await asyncio.sleep(0)


async def endless_head(send: Send) -> None:
    """Headers without end."""
    await send(_OK)
    while True:
        await send(b"x-more: " + b"x" * 1000 + b"\r\n")
        await asyncio.sleep(0)


async def huge_id(send: Send) -> None:
    """A message id of several megabytes, and a call with such a name."""
    huge = "i" * (3 * 2**20)
    start = {"type": "message_start", "message": {"id": huge, "type": "message", "role": "assistant", "content": []}}
    chunk = {"id": huge, "choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "id": huge}]}}]}
    await send(_OK + b"\r\nevent: message_start\ndata: " + json.dumps(start | chunk).encode() + b"\n\n")


async def deep_json(send: Send) -> None:
    """JSON of extreme nesting depth."""
    await send(_OK + b"\r\nevent: message_start\ndata: " + b"[" * 200_000 + b"]" * 200_000 + b"\n\n")


async def absurd_wait(send: Send) -> None:
    """A retry-after of 10^308 seconds."""
    await send(b"HTTP/1.1 429 Slow\r\nretry-after: 1e308\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}")


async def no_number(send: Send) -> None:
    """A retry-after of NaN."""
    await send(b"HTTP/1.1 529 Full\r\nretry-after: NaN\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}")


async def no_http(send: Send) -> None:
    """A response in another protocol."""
    await send(b"-ERR what is this\r\n")


async def page(send: Send) -> None:
    """The HTML page of a proxy."""
    await send(b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\nconnection: close\r\n\r\n<html>welcome</html>")


async def silence(send: Send) -> None:
    """A response head, and no body."""
    await send(_OK + b"\r\n")
    await asyncio.sleep(_LONG_S)


async def dripping_comments(send: Send) -> None:
    """A comment now and then: the connection is not silent, and nothing comes."""
    await send(_OK + b"\r\n")
    while True:
        await send(b": still here\n\n")
        await asyncio.sleep(_DRIP_S)


async def dripping_pings(send: Send) -> None:
    """The beginning of an answer, and then pings."""
    await send(_OK + b"\r\n" + _MESSAGE_START)
    while True:
        await send(b'event: ping\ndata: {"type":"ping"}\n\n')
        await asyncio.sleep(_DRIP_S)


async def dripping_words(send: Send) -> None:
    """An answer that makes progress, and never ends."""
    await send(_OK + b"\r\n")
    while True:
        await send(_event({"choices": [{"index": 0, "delta": {"content": "on "}}]}))
        await asyncio.sleep(_DRIP_S)


async def many_parts(send: Send) -> None:
    """100,000 parts in one event."""
    await send(_OK + b"\r\n" + _event({"candidates": [{"content": {"parts": _parts(_PARTS)}, "index": 0}]}))


async def many_parts_piecemeal(send: Send) -> None:
    """Thousands of parts in events of a moderate size, and no end."""
    await send(_OK + b"\r\n")
    for _ in range(4):
        await send(_event({"candidates": [{"content": {"parts": _parts(1000)}, "index": 0}]}))


async def many_choices(send: Send) -> None:
    """100,000 choices in one event."""
    choices = [{"index": n, "delta": {"content": "x"}} for n in range(_PARTS)]
    await send(_OK + b"\r\n" + _event({"choices": choices}))


async def many_blocks(send: Send) -> None:
    """100,000 blocks in one answer that is no stream."""
    message = {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "x"}] * _PARTS}
    body = json.dumps(message | {"id": "m", "model": "m", "stop_reason": "end_turn"}).encode()
    await send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n" + body)


_MESSAGE_START = b"""event: message_start
data: {"type":"message_start","message":{"id":"m","type":"message","role":"assistant","content":[]}}

"""


def _event(data: Any) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def _parts(number: int) -> list[dict[str, Any]]:
    return [{"text": "x", "thought": bool(n % 2)} for n in range(number)]


WAYS: tuple[Callable[[Send], Any], ...] = (
    gzip_bomb,
    gzip_bomb_in_a_bomb,
    bomb_as_an_error,
    wrong_encoding,
    unknown_encoding,
    no_utf8,
    endless_comments,
    endless_line,
    endless_head,
    huge_id,
    deep_json,
    absurd_wait,
    no_number,
    no_http,
    page,
    silence,
    dripping_comments,
    dripping_pings,
    dripping_words,
    many_parts,
    many_parts_piecemeal,
    many_choices,
    many_blocks,
)
_API_OF: dict[Callable[[Send], Any], str] = {
    dripping_pings: "anthropic",
    dripping_words: "openai-chat",
    many_parts: "gemini",
    many_parts_piecemeal: "gemini",
    many_choices: "openai-chat",
    many_blocks: "anthropic",
}
"""Attacks that only make sense in one API."""
KINDS: dict[str, tuple[Callable[[Send], Any], ...]] = {
    "bombs": (gzip_bomb, gzip_bomb_in_a_bomb, bomb_as_an_error),
    "endless lines": (endless_comments, endless_line, endless_head),
    "drips": (silence, dripping_comments, dripping_pings, dripping_words),
    "100,000 parts": (many_parts, many_parts_piecemeal, many_choices, many_blocks),
}
"""Attacks by what they take."""


def names_of(way: Callable[[Send], Any]) -> list[str]:
    """The providers at which an attack makes sense."""
    return [NAMES[_API_OF[way]]] if way in _API_OF else [*NAMES.values()]


def scene(run: str, chance: random.Random) -> tuple[Story, dict[str, Any]]:
    """A run with this attack: its story, and its request."""
    way = chance.choice(WAYS)
    names = names_of(way)
    provider = names[0] if len(names) == 1 else chance.choice(names)
    story = Story(run=run, provider=provider, mode="chat", stream=True, on_failure="fail", fate="hostile", pieces=())
    request: dict[str, Any] = {
        "type": "generate",
        "id": run,
        "provider": provider,
        "model": way.__name__,
        "stream": way is not many_blocks,
        "messages": [{"role": "user", "content": f"Please look at {run}"}],
        "on_failure": "fail",
    }
    return story, request


def huge_scene(run: str) -> tuple[Story, dict[str, Any]]:
    """A run whose request is too large for any worker: its story, and the request without its text."""
    story = Story(run=run, provider="anthropic", mode="chat", stream=True, on_failure="fail", fate="huge", pieces=())
    return story, {"type": "generate", "id": run, "provider": "anthropic", "model": "huge", "messages": []}


async def send_huge(port: int, stream: str, request: dict[str, Any], size: int) -> bool:
    """XADD this request with a text of this size, in pieces, to the server on this port. Whether it was accepted.

    Raises OSError if nobody knows.
    """
    head = json.dumps(request).encode()[:-1] + b',"text":"'
    words = b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in (b"XADD", stream.encode(), b"*", b"__data__"))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"*5\r\n%b$%d\r\n%b" % (words, len(head) + size + 2, head))
        for at in range(0, size, _HUGE_PIECE):
            writer.write(b"x" * min(_HUGE_PIECE, size - at))
            await writer.drain()
        writer.write(b'"}\r\n')
        if not (reply := await reader.readline()):
            raise ConnectionResetError
        return reply.startswith(b"$")
    finally:
        writer.close()


@asynccontextmanager
async def hostile_provider(*, port: int = 0) -> AsyncGenerator[str]:
    """The provider while it runs; its url. The model of a request selects the attack."""
    ways = {way.__name__: way for way in WAYS}
    serving: set[asyncio.Task[None]] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        serving.add(task)
        task.add_done_callback(serving.discard)

        async def send(data: bytes) -> None:
            for at in range(0, len(data), _PIECE):
                writer.write(data[at : at + _PIECE])
                await writer.drain()

        try:
            # uvloop raises RuntimeError on a write to a connection that was reset.
            with suppress(OSError, RuntimeError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                size = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
                request_body: dict[str, Any] = msgspec.json.decode(await reader.readexactly(size))
                async with asyncio.timeout(_LONG_S):
                    in_path = _MODEL_IN_PATH.search(head)
                    await ways[in_path[1].decode() if in_path else request_body["model"]](send)
        except asyncio.CancelledError:
            return  # the round is over; asyncio's streams treat a cancelled callback as a failed one
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", port)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
