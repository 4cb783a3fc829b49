"""Chunks are decoded as h11 decodes them, however the bytes are cut."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from itertools import pairwise

import h11
from hypothesis import example, given
from hypothesis import strategies as st

from tokenbus_services.net.http_client import FAIR_S, ChunkDecoder, fair_reads

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
LINES = st.sampled_from(
    [b"0\r\n\r\n", b"5;x=y\r\nabcde\r\n", b"zz\r\n", b"0" * 30, b"3\r\nabcd", b"\r\n", b"0\r\na: b\r\n\r\n"]
)


def _by_h11(pieces: list[bytes]) -> tuple[bytes, str]:
    """The content, and how it ends."""
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(HEAD)
    assert isinstance(connection.next_event(), h11.Response)
    content = b""
    left = [*pieces, b""]
    while True:
        try:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(left.pop(0))
        except h11.RemoteProtocolError:
            return content, "error"
        if isinstance(event, h11.Data):
            content += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            return content, "end"


def _by_us(pieces: list[bytes]) -> tuple[bytes, str]:
    decoder = ChunkDecoder()
    content = b""
    left = [*pieces]
    while decoder.rest is None and left:
        content += decoder.feed(left.pop(0))
    if decoder.malformed is not None:
        return content, "error"
    decoder.stop()
    assert decoder.rest is not None
    rest, how = _by_h11([each for each in (decoder.rest, *left) if each])
    return content + rest, how


@given(
    st.lists(st.binary(min_size=1, max_size=20), max_size=6),
    st.one_of(st.just(b"0\r\n\r\n"), st.just(b""), LINES),
    st.lists(st.integers(0, 200), max_size=12),
    st.integers(0, 5),
)
@example([b"abc", b"de"], b"0\r\n\r\n", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], 0)
@example([b"abc"], b"3\r\nabcd", [], 0)
def test_any_cut_of_any_body_is_read_as_h11_reads_it(
    chunks: list[bytes], end: bytes, cuts: list[int], dropped: int
) -> None:
    body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + end
    body = body[: len(body) - dropped]
    marks = sorted({0, len(body), *(cut for cut in cuts if cut < len(body))})
    pieces = [body[a:b] for a, b in pairwise(marks)]
    (content, how), (wanted, ends) = _by_us(pieces), _by_h11(pieces)
    assert (content, how) == (wanted, ends)


async def test_a_body_that_is_much_work_is_passed_on_in_parts_and_lets_others_run_between_them() -> None:
    content = bytes(range(256)) * 1024

    async def reads() -> AsyncIterator[bytes]:
        yield content

    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    parts: list[bytes] = []
    async for part in fair_reads(reads()):
        parts.append(part)
        until = time.thread_time() + len(part) * 1e-6  # a microsecond for each byte
        while time.thread_time() < until:
            pass
    task.cancel()
    assert b"".join(parts) == content
    assert max(len(part) for part in parts[1:]) <= 4 * FAIR_S * 1e6
    assert turns > len(parts) // 4 > 10


async def test_a_body_that_is_little_work_is_passed_on_in_whole_reads_after_the_first() -> None:
    async def reads() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield bytes(64 * 1024)

    parts = [len(part) async for part in fair_reads(reads())]
    assert sum(parts) == 10 * 64 * 1024
    assert parts[-1] == 64 * 1024
