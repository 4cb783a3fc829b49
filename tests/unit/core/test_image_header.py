"""The size of an image in pixels, from headers that are not trusted."""

from __future__ import annotations

from base64 import b64decode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.providers.test_sdk_types import PIXEL
from tokenbus.blobs import blob_id_of
from tokenbus.core.image_header import in_blob, pixels
from tokenbus.events.normalized import Image

PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\x0dIHDR\x00\x00\x04\x00\x00\x00\x03\x00\x08\x06"
GIF = b"GIF89a\x40\x01\xc8\x00\xf7\x00\x00"
LOSSY = b"RIFF\x00\x01\x00\x00WEBPVP8 \xff\x00\x00\x00\x30\x01\x00\x9d\x01\x2a\x00\x43\x20\x81"
LOSSLESS = b"RIFF\x00\x01\x00\x00WEBPVP8L\xff\x00\x00\x00\x2f\xff\xc2\x47\x10"
EXTENDED = b"RIFF\x00\x01\x00\x00WEBPVP8X\x0a\x00\x00\x00\x10\x00\x00\x00\xff\x03\x00\xff\x01\x01"


def jpeg(*before: bytes, frame: int = 0xC0) -> bytes:
    """One of 640 by 480 with these segments before its frame."""
    return b"\xff\xd8" + b"".join(before) + b"\xff%b\x00\x11\x08\x01\xe0\x02\x80\x03" % bytes([frame]) + b"\x01\x22\x00"


def segment(marker: int, content: bytes) -> bytes:
    return b"\xff%b%b%b" % (bytes([marker]), (len(content) + 2).to_bytes(2, "big"), content)


EXIF = segment(0xE1, b"Exif\0\0\xff\xc0\x00\x11\x08\x00\x01\x00\x01" + bytes(40_000))
"""With the frame of a thumbnail in it, which is not the image's."""


@pytest.mark.parametrize(
    ("content", "size"),
    [
        (PNG, (1024, 768)),
        (b64decode(PIXEL), (1, 1)),
        (GIF, (320, 200)),
        (GIF.replace(b"89a", b"87a"), (320, 200)),
        (jpeg(segment(0xE0, b"JFIF\0")), (640, 480)),
        (jpeg(EXIF, segment(0xDB, bytes(65)), segment(0xC4, bytes(20)), frame=0xC2), (640, 480)),
        (jpeg(b"\xff\xff\xff" + segment(0xFE, b"said")[1:], b"\xff\x01"), (640, 480)),
        (LOSSY, (0x300, 0x120)),
        (LOSSLESS, (0x300, 0x120)),
        (EXTENDED, (0x400, 0x10200)),
    ],
    ids=["png", "a real png", "gif", "gif of 87", "jpeg", "progressive", "filled", "webp", "lossless", "extended"],
)
def test_the_size_of_an_image_is_what_its_header_says(content: bytes, size: tuple[int, int]) -> None:
    assert pixels(content) == size
    assert pixels(content + bytes(100)) == size


WHOLE = [PNG, GIF, jpeg(EXIF), LOSSY, LOSSLESS, EXTENDED]


@pytest.mark.parametrize("content", WHOLE)
def test_a_header_that_is_cut_says_nothing(content: bytes) -> None:
    needed = next(size for size in range(len(content) + 1) if pixels(content[:size]))
    assert not any(pixels(content[:size]) for size in range(needed))
    assert all(pixels(content[:size]) == pixels(content) for size in range(needed, len(content)))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"<svg/>",
        PNG.replace(b"IHDR", b"iDOT"),
        PNG[:16] + bytes(8),
        GIF[:6] + bytes(4),
        jpeg().replace(b"\x01\xe0", b"\x00\x00"),
        b"\xff\xd8\xff\xd9" + bytes(50),
        b"\xff\xd8" + b"\xff\xe0\x00\x00" * 10,  # a length that does not count itself
        b"\xff\xd8" + b"\xff" * 24_000_000,
        b"\xff\xd8" + b"\xff\xd0" * 12_000_000 + jpeg()[2:],
        b"\xff\xd8" + segment(0xE0, b"") * 100_000 + jpeg()[2:],
        b"RIFF\x00\x01\x00\x00WEBPALPH" + bytes(50),
        LOSSY.replace(b"\x9d\x01\x2a", b"\x9d\x01\x2b"),
        LOSSLESS.replace(b"\x2f", b"\x2e"),
        b"RIFF\x00\x01\x00\x00WAVEVP8X" + EXTENDED[16:],
    ],
)
def test_what_is_no_image_or_means_harm_says_nothing(content: bytes) -> None:
    assert pixels(content) is None


@given(st.sampled_from(WHOLE), st.integers(0, 60), st.binary(max_size=30))
def test_no_bytes_raise(content: bytes, at: int, instead: bytes) -> None:
    size = pixels(content[:at] + instead + content[at + len(instead) :])
    assert size is None or min(size) > 0


def test_an_image_in_a_blob_is_sent_with_its_size() -> None:
    image = Image(0, "image/png", PIXEL, True, size="1024x1024")
    content = b64decode(PIXEL)
    reference = in_blob(image, content, blob_id_of(content))
    assert reference == Image(
        *(0, "image/png", "", True), size="1024x1024", blob_id=blob_id_of(content), size_bytes=70, width=1, height=1
    )
    assert in_blob(image, b"?", "b").width == 0
