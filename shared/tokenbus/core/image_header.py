"""Read an image's size in pixels from its header, without decoding it.

Supports the formats that models produce: PNG (https://www.w3.org/TR/png-3, 11.2.1), JPEG (ITU-T T.81, B.2.2), WebP (RFC
9649) and GIF (GIF89a, 18). A header may be wrong. The size is only a layout hint for clients, and nothing is allocated
for it here.
"""

from __future__ import annotations

import re
from base64 import b64decode
from typing import Literal

import msgspec

from tokenbus.events.normalized import Image

_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""Markers of frame headers; the three excluded ones are tables and a reserved marker."""
_JPEG_ALONE = frozenset({0x01, *range(0xD0, 0xD9)})
"""Markers without a length field."""
_HEADER_CHARS = 256 * 1024
"""Characters of base64 in which a header is looked for."""
_MOST_SEGMENTS = 1000
"""Maximum segments before a JPEG's frame header. Images have some dozens, one per 64 KiB of metadata."""


def in_blob(image: Image, content: bytes, blob_id: str) -> Image:
    """The image with its metadata, after its bytes were moved to the blob store."""
    width, height = pixels(content) or (0, 0)
    about = {"blob_id": blob_id, "size_bytes": len(content), "width": width, "height": height}
    return msgspec.structs.replace(image, base64="", **about)


def measured(image: Image) -> Image:
    """The image with its metadata, if its bytes are in it."""
    if not image.base64 or image.size_bytes:
        return image
    try:
        width, height = pixels(b64decode(image.base64[:_HEADER_CHARS])) or (0, 0)
    except ValueError:  # the one that stores it says so
        return image
    return msgspec.structs.replace(image, size_bytes=decoded_size(image.base64), width=width, height=height)


def decoded_size(base64: str) -> int:
    """Bytes of a padded base64 text."""
    return len(base64) * 3 // 4 - base64[-2:].count("=")


def format_of(content: bytes) -> str | None:
    """Media type by the content's magic bytes; None for other formats."""
    if content.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if content.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    if content.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    return "image/webp" if content.startswith(b"RIFF") and content[8:12] == b"WEBP" else None


def pixels(content: bytes) -> tuple[int, int] | None:
    """Width and height, both above 0; None if the format is unknown or the content too short. Never raises."""
    match format_of(content):
        case "image/png":
            size = _two(content, 16, 4, "big") if content[12:16] == b"IHDR" else None
        case "image/gif":
            size = _two(content, 6, 2, "little")
        case "image/jpeg":
            size = _of_jpeg(content)
        case "image/webp":
            size = _of_webp(content)
        case _:
            size = None
    return size if size and min(size) > 0 else None


def _of_jpeg(content: bytes) -> tuple[int, int] | None:
    at = 2
    for _ in range(_MOST_SEGMENTS):
        if at + 4 > len(content) or content[at] != 0xFF:
            return None
        marker = content[at + 1]
        if marker in _JPEG_FRAMES:
            size = _two(content, at + 5, 2, "big")
            return size and (size[1], size[0])
        if marker == 0xFF:  # markers may be preceded by fill bytes
            at += 1
            continue
        at += 2 if marker in _JPEG_ALONE else 2 + int.from_bytes(content[at + 2 : at + 4], "big")
    return None


def _of_webp(content: bytes) -> tuple[int, int] | None:
    match content[12:16]:
        case b"VP8X" if size := _two(content, 24, 3, "little"):
            return size[0] + 1, size[1] + 1
        case b"VP8L" if content[20:21] == b"\x2f" and len(content) >= 25:
            bits = int.from_bytes(content[21:25], "little")
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8 " if content[23:26] == b"\x9d\x01\x2a" and (size := _two(content, 26, 2, "little")):
            return size[0] & 0x3FFF, size[1] & 0x3FFF
        case _:
            return None


def _two(content: bytes, at: int, size: int, order: Literal["big", "little"]) -> tuple[int, int] | None:
    """Two adjacent integers of ``size`` bytes each."""
    first, second = content[at : at + size], content[at + size : at + 2 * size]
    if len(second) < size:
        return None
    return int.from_bytes(first, order), int.from_bytes(second, order)


# The placeholder starts with a secret of the attempt that the reader of the answer knows and its author does not.
# Therefore no provider and no model can refer to a blob of another run.


_WORDS = re.compile(r"tokenbus:(?P<secret>[0-9a-f]+):(?P<blob_id>sha256:[0-9a-f]{64}):(?P<numbers>\d+:\d+:\d+)")


def name_of(secret: str, blob_id: str, size: int, width: int, height: int) -> bytes:
    """Build the placeholder, which needs no JSON escapes. ``secret``: hex digits; ``size``: bytes of the image; 0
    pixels: unknown.
    """
    return f"tokenbus:{secret}:{blob_id}:{size}:{width}:{height}".encode()


def found(image: Image, secret: str) -> Image:
    """Resolve a placeholder to its blob; other images are returned unchanged."""
    words = _WORDS.fullmatch(image.base64[:300]) if secret else None
    if words is None or words["secret"] != secret:
        return image
    size, width, height = map(int, words["numbers"].split(":"))
    blob_id = words["blob_id"]
    return msgspec.structs.replace(image, base64="", blob_id=blob_id, size_bytes=size, width=width, height=height)
