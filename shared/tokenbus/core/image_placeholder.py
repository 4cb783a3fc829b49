"""Placeholder for an image's base64 in a provider's answer, after a fetcher moved the image to the blob store.

The placeholder starts with a secret of the attempt that the reader of the answer knows and its author does not.
Therefore no provider and no model can refer to a blob of another run.
"""

from __future__ import annotations

import re

import msgspec

from tokenbus.events.normalized import Image

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
