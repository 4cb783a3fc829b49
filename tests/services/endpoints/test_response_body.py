"""An answer's body is decoded in bounded steps, and what is too large or does not decode is named."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import AsyncIterator, Iterable
from itertools import pairwise

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.events.error_info import ErrorInfo
from tokenbus.providers.response.decoder import MAX_ERROR_BODY_BYTES
from tokenbus_services.endpoints.response_body import (
    FREE_BYTES,
    PIECE_BYTES,
    BodyRefused,
    Inflate,
    beginning,
    described,
    read_body,
)
from tokenbus_services.net.http_client import MAX_CRUMBS

TEXT = b"".join(b'data: {"delta":"word %d"}\n\n' % n for n in range(2_000))


class Body(httpx.AsyncByteStream):
    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece


def answer(*pieces: bytes, encoding: str | None = None, status: int = 200) -> httpx.Response:
    headers = {} if encoding is None else {"content-encoding": encoding}
    return httpx.Response(status, headers=headers, stream=Body(pieces))


async def read(response: httpx.Response, *, limit: int = 2**30) -> tuple[int, int]:
    """How much came in all, and the largest piece."""
    sizes = [len(piece) async for piece in read_body(response, limit=limit)]
    assert all(sizes)
    return sum(sizes), max(sizes, default=0)


async def refusal(response: httpx.Response, *, limit: int = 2**30) -> ErrorInfo:
    with pytest.raises(BodyRefused) as refused:
        await read(response, limit=limit)
    return refused.value.error


def raw_deflate(data: bytes) -> bytes:
    deflate = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return deflate.compress(data) + deflate.flush()


CODED = {
    "gzip": gzip.compress(TEXT),
    "x-gzip": gzip.compress(TEXT[:999]) + gzip.compress(TEXT[999:]) + b"\0\0\0",
    "GZIP, identity": gzip.compress(TEXT),
    "deflate": zlib.compress(TEXT),
    "Deflate": raw_deflate(TEXT),
    "identity": TEXT,
}


@pytest.mark.parametrize("encoding", CODED)
@given(cuts=st.lists(st.integers(0, 12_000), max_size=6))
def test_a_coded_body_is_read_as_it_was_however_it_is_cut(encoding: str, cuts: list[int]) -> None:
    coded = CODED[encoding]
    places = sorted({0, 1, *(cut % len(coded) for cut in cuts), len(coded)})
    pieces = [coded[a:b] for a, b in pairwise(places)]

    async def whole() -> bytes:
        return b"".join([piece async for piece in read_body(answer(*pieces, encoding=encoding), limit=10**9)])

    assert asyncio.run(whole()) == TEXT


def test_a_second_member_is_known_though_its_first_byte_comes_alone() -> None:
    first = len(gzip.compress(TEXT[:999]))
    pieces = [CODED["x-gzip"][:first], CODED["x-gzip"][first : first + 1], CODED["x-gzip"][first + 1 :]]
    inflate = Inflate("gzip")
    assert b"".join(piece for read in pieces for piece in inflate.feed(read)) == TEXT
    inflate.end()


def test_what_a_server_flushed_is_given_at_once() -> None:
    deflate = zlib.compressobj(wbits=31)
    inflate = Inflate("gzip")
    for word in (b"data: 1\n\n", b"data: 2\n\n"):
        flushed = deflate.compress(word) + deflate.flush(zlib.Z_SYNC_FLUSH)
        assert b"".join(inflate.feed(flushed)) == word


@pytest.mark.parametrize("encoding", ["gzip, gzip", "gzip,deflate", "br", "zstd", "identity, br", "x" * 500])
async def test_an_unrequested_or_nested_content_encoding_is_refused_by_name(encoding: str) -> None:
    error = await refusal(answer(gzip.compress(gzip.compress(b"x")), encoding=encoding))
    assert (error.code, error.kind, error.retryable) == ("body_encoding", "protocol", False)
    assert len(error.message) < 300


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize("body", [b"data: {}\n\n", gzip.compress(TEXT)[:-20], gzip.compress(TEXT)[:500] + b"\0" * 500])
async def test_a_compressed_body_that_does_not_decode_may_be_tried_again(encoding: str, body: bytes) -> None:
    error = await refusal(answer(body, encoding=encoding))
    assert (error.code, error.kind, error.retryable) == ("body_undecodable", "protocol", True)


async def test_a_small_body_that_becomes_a_large_one_is_left_off_at_its_ratio() -> None:
    bomb = gzip.compress(bytes(64 * 2**20))
    given = 0

    async def take() -> None:
        nonlocal given
        async for piece in read_body(answer(bomb, encoding="gzip"), limit=2**40):
            given += len(piece)
            assert len(piece) <= PIECE_BYTES

    with pytest.raises(BodyRefused) as refused:
        await take()
    assert (refused.value.error.code, refused.value.error.kind) == ("body_ratio", "limit")
    assert given <= FREE_BYTES


async def test_an_answer_over_its_limit_ends_there_coded_or_not() -> None:
    for response in (answer(*([bytes(1000)] * 20)), answer(gzip.compress(bytes(20_000)), encoding="gzip")):
        error = await refusal(response, limit=10_000)
        assert (error.code, error.kind, error.retryable) == ("answer_too_large", "limit", False)
    assert await read(answer(bytes(10_000)), limit=10_000) == (10_000, 10_000)


async def test_of_an_errors_body_only_the_beginning_is_read_and_its_coding_is_no_error_of_its_own() -> None:
    sent = 0

    def endless() -> Iterable[bytes]:
        nonlocal sent
        while True:
            sent += 1000
            yield bytes(1000)

    assert await read(httpx.Response(500, stream=Body(endless()))) == (MAX_ERROR_BODY_BYTES, 1000)
    assert sent < MAX_ERROR_BODY_BYTES + 2_000
    assert await read(answer(gzip.compress(b"no"), encoding="gzip, gzip", status=401)) == (0, 0)
    assert await read(answer(b"no", encoding="gzip", status=503)) == (0, 0)
    assert await read(answer(gzip.compress(b"no"), encoding="gzip", status=503)) == (2, 2)
    bomb = answer(gzip.compress(bytes(10**8)), encoding="gzip", status=503)
    assert await read(bomb) == (MAX_ERROR_BODY_BYTES, MAX_ERROR_BODY_BYTES)


async def test_only_the_beginning_of_an_answer_is_read_if_no_more_is_requested() -> None:
    assert await beginning(answer(*([bytes(100)] * 3)), 150) == bytes(150)
    assert await beginning(answer(gzip.compress(bytes(10**7)), encoding="gzip"), 150) == bytes(150)
    assert await beginning(answer(b"short"), 150) == b"short"


async def test_thousands_of_one_byte_chunks_delay_no_other_call() -> None:
    others = 0

    async def other() -> None:
        nonlocal others
        while True:
            others += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    assert (await read(answer(*([b"x"] * MAX_CRUMBS))))[0] == MAX_CRUMBS
    assert others > MAX_CRUMBS / 20
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_an_answer_all_of_crumbs_is_left_off() -> None:
    error = await refusal(answer(*([b"x"] * (MAX_CRUMBS + 2))))
    assert (error.code, error.kind) == ("answer_chunks", "limit")
    assert (await read(answer(*([b"data: {}\n\n"] * (MAX_CRUMBS + 2)))))[1] == 10


def test_an_error_without_a_message_names_its_cause() -> None:
    error = httpx.ReadError("")
    assert described(error) == "ReadError"
    error.__cause__ = ConnectionResetError("reset by peer")
    assert described(error) == "ReadError: ConnectionResetError: reset by peer"
    assert described(httpx.ReadError("gone")) == "ReadError: gone"
