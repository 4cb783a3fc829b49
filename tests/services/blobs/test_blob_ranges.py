"""Parts of a blob, as RFC 9110 asks for them."""

from __future__ import annotations

import httpx
import pytest

from tests.services.blobs.conftest import MemoryBlobs, Served
from tokenbus_services.blobs.client import HttpBlobs
from tokenbus_services.blobs.store import ByteRange, OutOfRange, part_of

CONTENT = bytes(range(256)) * 4000


@pytest.mark.parametrize(
    ("header", "size", "part"),
    [
        ("bytes=0-0", 10, ByteRange(0, 1)),
        ("bytes=2-4", 10, ByteRange(2, 5)),
        ("bytes=2-", 10, ByteRange(2, 10)),
        ("bytes=2-99", 10, ByteRange(2, 10)),
        ("bytes=-3", 10, ByteRange(7, 10)),
        ("bytes=-99", 10, ByteRange(0, 10)),
        ("bytes= 1-2 ", 10, ByteRange(1, 3)),
        ("", 10, None),
        ("bytes=-", 10, None),
        ("bytes=4-2", 10, None),
        ("bytes=0-1,3-4", 10, None),
        ("items=0-1", 10, None),
        ("bytes=a-b", 10, None),
        ("bytes=٣-٤", 10, None),
    ],
)
def test_a_valid_range_is_read_and_an_invalid_one_gives_the_whole(
    header: str, size: int, part: ByteRange | None
) -> None:
    assert part_of(header, size) == part


@pytest.mark.parametrize(
    ("header", "size"), [("bytes=10-", 10), ("bytes=99-100", 10), ("bytes=-0", 10), ("bytes=-1", 0)]
)
def test_a_range_beyond_the_end_is_reported(header: str, size: int) -> None:
    with pytest.raises(OutOfRange):
        part_of(header, size)


async def test_a_part_is_given_out_with_its_place(service: Served, blob_store: MemoryBlobs) -> None:
    async with HttpBlobs(service.url) as blobs, httpx.AsyncClient(base_url=service.url, timeout=60) as http:
        ref = await blobs.store(CONTENT, "video/mp4")
        url, size = f"/blobs/{ref.blob_id}", len(CONTENT)
        whole = await http.get(url)
        assert (whole.status_code, whole.headers["accept-ranges"]) == (200, "bytes")
        part = await http.get(url, headers={"Range": "bytes=1000-600000"})
        assert part.status_code == 206
        assert part.headers["content-range"] == f"bytes 1000-600000/{size}"
        assert part.headers["content-type"] == "video/mp4"
        assert part.headers["etag"] == whole.headers["etag"]
        assert part.content == CONTENT[1000:600001]
        last = await http.get(url, headers={"Range": "bytes=-5"})
        assert (last.status_code, last.content) == (206, CONTENT[-5:])
        beyond = await http.get(url, headers={"Range": f"bytes={size}-"})
        assert (beyond.status_code, beyond.headers["content-range"]) == (416, f"bytes */{size}")


async def test_a_range_counts_only_for_the_content_that_its_reader_began_with(service: Served) -> None:
    async with HttpBlobs(service.url) as blobs, httpx.AsyncClient(base_url=service.url, timeout=60) as http:
        ref = await blobs.store(CONTENT, "text/plain")
        same = {"Range": "bytes=0-9", "If-Range": f'"{ref.blob_id}"'}
        assert (await http.get(f"/blobs/{ref.blob_id}", headers=same)).content == CONTENT[:10]
        other = {"Range": "bytes=0-9", "If-Range": '"another"'}
        assert (await http.get(f"/blobs/{ref.blob_id}", headers=other)).status_code == 200
        head = await http.head(f"/blobs/{ref.blob_id}", headers={"Range": "bytes=0-9"})
        assert (head.status_code, head.headers["content-length"]) == (200, str(len(CONTENT)))
