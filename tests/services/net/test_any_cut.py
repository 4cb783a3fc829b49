"""However the bytes of an answer are cut, and wherever they end, it is read as httpx itself reads it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from typing import Any

import httpcore
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.providers.corpus import APIS, further_recordings, recordings
from tokenbus_services.net import http_client
from tokenbus_services.net.connection import Connection
from tokenbus_services.net.http_client import Transport

UNUSED = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
BODIES = [row.data for row in recordings(*APIS) + further_recordings(*APIS) if row.bytes < 100_000] or [b"data: x\n\n"]
Outcome = tuple[int, list[tuple[bytes, bytes]], bytes, type[Exception] | None]
"""Status, headers, the body that came, and the error that ended it."""


class _Peer(asyncio.Transport):
    """Answers the first write with these pieces, and closes."""

    def __init__(self, connection: Connection, pieces: Sequence[bytes]) -> None:
        super().__init__()
        self._connection = connection
        self._pieces = pieces
        self._closed = False

    def write(self, data: Any) -> None:
        loop = asyncio.get_running_loop()
        for piece in self._pieces:
            loop.call_soon(self._connection.data_received, piece)
        loop.call_soon(self._connection.connection_lost, None)
        self._pieces = ()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def is_closing(self) -> bool:
        return self._closed

    def abort(self) -> None:
        self._closed = True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


async def _read(transport: httpx.AsyncBaseTransport) -> Outcome:
    request = httpx.Request("GET", "http://provider.invalid/")
    status, headers, body = 0, [], b""
    try:
        response = await transport.handle_async_request(request)
        status, headers = response.status_code, response.headers.raw
        assert isinstance(response.stream, httpx.AsyncByteStream)
        stream: AsyncIterator[bytes] = aiter(response.stream)
        async for piece in stream:
            body += piece
        await response.stream.aclose()
    except httpx.TransportError as e:
        return status, headers, body, next(kind for kind in type(e).__mro__ if kind.__module__ == "httpx")
    return status, headers, body, None


async def _theirs(pieces: Sequence[bytes]) -> Outcome:
    transport = httpx.AsyncHTTPTransport(verify=UNUSED)
    backend = httpcore.AsyncMockBackend([*pieces])
    transport._pool = httpcore.AsyncConnectionPool(network_backend=backend)  # httpx has no parameter for it
    return await _read(transport)


async def _ours(pieces: Sequence[bytes]) -> Outcome:
    async def connect(hosts: Sequence[str], port: int) -> Connection:
        connection = Connection()
        connection.connection_made(_Peer(connection, pieces))
        return connection

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_client, "connect", connect)
        return await _read(Transport())


def _framed(body: bytes, framing: str, sizes: Sequence[int]) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nx-request-id: \xe4\r\nempty:\r\n"
    match framing:
        case "length":
            return head + b"content-length: %d\r\n\r\n" % len(body) + body
        case "until it closes":
            return head + b"\r\n" + body
        case _:
            marks = sorted({0, len(body), *(size % (len(body) + 1) for size in sizes)})
            chunks = [body[a:b] for a, b in pairwise(marks)]
            said = b"".join(b"%X%b\r\n%b\r\n" % (len(c), b";x=y" * (framing == "extended"), c) for c in chunks)
            return head + b"Transfer-Encoding: chunked\r\n\r\n" + said + b"0\r\n\r\n"


def _cut(data: bytes, cuts: Sequence[float]) -> list[bytes]:
    marks = sorted({0, len(data), *(int(cut * len(data)) for cut in cuts)})
    return [data[a:b] for a, b in pairwise(marks)]


CUTS = st.lists(st.floats(0, 1), max_size=30)
FRAMINGS = st.sampled_from(["chunked", "extended", "length", "until it closes"])


@given(
    st.sampled_from(BODIES), FRAMINGS, st.lists(st.integers(0, 2**20), max_size=40), CUTS, st.floats(0, 1) | st.none()
)
def test_any_cut_of_a_recorded_answer_is_read_as_httpx_reads_it(
    body: bytes, framing: str, sizes: list[int], cuts: list[float], end: float | None
) -> None:
    data = _framed(body, framing, sizes)
    data = data if end is None else data[: int(end * len(data))]
    pieces = _cut(data, cuts)
    assert asyncio.run(_ours(pieces)) == asyncio.run(_theirs(pieces))


ODD = st.sampled_from(
    (
        *(b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b";", b"0", b"5", b"f", b"-1", b"HTTP/1.1 ", b"\xff"),
        *(b"0\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n", b"content-length: 3\r\n", b"connection: close\r\n"),
        b"transfer-encoding: chunked\r\n",
    )
)


@given(
    st.sampled_from(BODIES[:8]),
    FRAMINGS,
    st.lists(st.integers(0, 2000), max_size=6),
    st.lists(st.tuples(st.integers(1, 400), st.integers(0, 3), ODD), min_size=1, max_size=3),
    CUTS,
)
def test_an_answer_that_httpx_refuses_is_refused_and_any_other_is_read_alike_or_refused(
    body: bytes, framing: str, sizes: list[int], oddities: list[tuple[int, int, bytes]], cuts: list[float]
) -> None:
    data = _framed(body[:300], framing, sizes)
    for at, dropped, odd in oddities:
        data = data[:at] + odd + data[at + dropped :]
    pieces = _cut(data, cuts)
    ours, theirs = asyncio.run(_ours(pieces)), asyncio.run(_theirs(pieces))
    if ours[3] is not httpx.RemoteProtocolError:
        assert ours == theirs
