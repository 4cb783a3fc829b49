"""The body of a request with blobs in it: right to the byte, and never in memory as a whole."""

from __future__ import annotations

import tracemalloc
from base64 import b64encode
from collections.abc import AsyncGenerator, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.blobs import blob_id_of
from tokenbus.errors import BlobUnavailable
from tokenbus_services.media.blob_cache import Found
from tokenbus_services.media.locate import Embedded, MediaBody, MediaFailed, base64_size

MB = 2**20


def embedded(pieces: Sequence[bytes], *, size: int | None = None) -> Embedded:
    async def read() -> AsyncGenerator[bytes]:
        for piece in pieces:
            yield piece

    whole = b"".join(pieces)
    return Embedded(
        "messages[3].content[1]", blob_id_of(whole), Found(len(whole) if size is None else size, "image/png", read)
    )


async def whole(body: MediaBody) -> bytes:
    return b"".join([piece async for piece in body])


@given(st.lists(st.binary(max_size=7), max_size=12), st.lists(st.binary(max_size=4), max_size=3))
async def test_however_the_store_cuts_a_blob_its_base64_is_that_of_the_whole(
    pieces: list[bytes], others: list[bytes]
) -> None:
    body = MediaBody([b'{"a":"', embedded(pieces), b'","b":"', embedded(others), b'"}'])
    content = await whole(body)
    assert content == b'{"a":"%b","b":"%b"}' % (b64encode(b"".join(pieces)), b64encode(b"".join(others)))
    assert len(content) == body.size


@given(st.lists(st.binary(max_size=7), max_size=12))
async def test_a_raw_blob_is_embedded_without_base64(pieces: list[bytes]) -> None:
    body = MediaBody([b"--x", msgspec.structs.replace(embedded(pieces), raw=True), b"--x--"])
    content = await whole(body)
    assert content == b"--x%b--x--" % b"".join(pieces)
    assert len(content) == body.size


@given(st.binary(max_size=50))
def test_the_size_of_base64_is_known_before_it_is_made(content: bytes) -> None:
    assert base64_size(len(content)) == len(b64encode(content))


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("announced", [5, 7])
async def test_a_blob_with_a_wrong_announced_size_ends_the_body_with_an_error(announced: int, raw: bool) -> None:
    with pytest.raises(MediaFailed, match=r"messages\[3\].*received 6 bytes"):
        await whole(MediaBody([msgspec.structs.replace(embedded([b"abc", b"def"], size=announced), raw=raw)]))


async def test_a_store_that_breaks_off_ends_the_body_with_its_error_and_a_reader_left_off_is_closed() -> None:
    closed = 0

    async def read() -> AsyncGenerator[bytes]:
        nonlocal closed
        try:
            yield b"abc"
            raise BlobUnavailable("blobs", "away")
        finally:
            closed += 1

    blob = Embedded("messages[3].content[1]", blob_id_of(b""), Found(6, None, read))
    with pytest.raises(MediaFailed) as e:
        await whole(MediaBody([blob]))
    assert (e.value.error.code, e.value.error.where) == ("blob_unavailable", "messages[3].content[1]")
    left_off = MediaBody([blob])
    async for _ in left_off:
        break
    await left_off.aclose()
    assert closed == 2


@pytest.mark.parametrize("raw", [False, True])
async def test_a_blob_of_20_mb_is_sent_with_a_small_part_of_its_size_in_memory(raw: bool) -> None:
    size, piece = 20 * MB, bytes(64 * 1024)

    async def read() -> AsyncGenerator[bytes]:
        for _ in range(size // len(piece)):
            yield piece

    blob = Embedded("messages[3].content[1]", blob_id_of(b""), Found(size, None, read), raw)
    body = MediaBody([b'{"a":"', blob, b'"}'])
    tracemalloc.start()
    try:
        async for sent in body:
            assert len(sent) <= 128 * 1024
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < MB
