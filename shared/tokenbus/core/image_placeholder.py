"""What stands in a provider's answer where the base64 of an image stood, once a fetcher has moved the image away.

The words begin with a secret of the attempt, which whoever reads the answer knows and whoever wrote it does not: no
provider, and no model, can name a blob of somebody else's.
"""

from __future__ import annotations

import re

import msgspec

from tokenbus.events.normalized import Image

_WORDS = re.compile(r"tokenbus:(?P<secret>[0-9a-f]+):(?P<blob_id>sha256:[0-9a-f]{64}):(?P<numbers>\d+:\d+:\d+)")


def name_of(secret: str, blob_id: str, size: int, width: int, height: int) -> bytes:
    """The words, which need no escape in JSON. ``secret``: hex digits; ``size``: bytes of the image; 0 pixels: not
    known."""
    return f"tokenbus:{secret}:{blob_id}:{size}:{width}:{height}".encode()


def found(image: Image, secret: str) -> Image:
    """The image in its blob, where such words stand in place of its base64; else as it is."""
    words = _WORDS.fullmatch(image.base64[:300]) if secret else None
    if words is None or words["secret"] != secret:
        return image
    size, width, height = map(int, words["numbers"].split(":"))
    blob_id = words["blob_id"]
    return msgspec.structs.replace(image, base64="", blob_id=blob_id, size_bytes=size, width=width, height=height)
