"""How large an image is in pixels, as the first bytes of its format say; nothing of it is decoded.

The formats that models make: PNG (https://www.w3.org/TR/png-3, 11.2.1), JPEG (ITU-T T.81, B.2.2), WebP (RFC 9649) and
GIF (GIF89a, 18). What a header says need not be true: it is told to whoever lays out a page, and takes no memory here.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tokenbus.events.normalized import Image

_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""Markers of a frame's header; the three others in that range are tables and a reserve."""
_JPEG_ALONE = frozenset({0x01, *range(0xD0, 0xD9)})
"""Markers without a length."""
_MOST_SEGMENTS = 1000
"""Looked through before a JPEG's frame: an image has some dozens, one for each 64 KiB of what is beside it."""


def in_blob(image: Image, content: bytes, blob_id: str) -> Image:
    """The image as it is told of once its bytes lie in the blob store."""
    width, height = pixels(content) or (0, 0)
    about = {"blob_id": blob_id, "size_bytes": len(content), "width": width, "height": height}
    return msgspec.structs.replace(image, base64="", **about)


def format_of(content: bytes) -> str | None:
    """The media type of these formats that the content begins like."""
    if content.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if content.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    if content.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    return "image/webp" if content.startswith(b"RIFF") and content[8:12] == b"WEBP" else None


def pixels(content: bytes) -> tuple[int, int] | None:
    """Width and height, both over 0; None for what is none of these formats, or too short. Never raises."""
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
        if marker == 0xFF:  # a marker may have some of them in front
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
    """Two numbers of ``size`` bytes side by side."""
    first, second = content[at : at + size], content[at + size : at + 2 * size]
    if len(second) < size:
        return None
    return int.from_bytes(first, order), int.from_bytes(second, order)
