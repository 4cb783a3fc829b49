"""Images in the results of tools: which of them the model is shown, beside the note that stands in the text."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence

from tokenbus.blobs import plain_media_type
from tokenbus.events.frames import ResultImage

SHOWN_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")
"""What all provider APIs take."""


def is_shown(media_type: str) -> bool:
    """Whether models can see images of this type."""
    return plain_media_type(media_type) in SHOWN_TYPES


def shown(content: bytes, media_type: str, blob_id: str | None) -> ResultImage:
    """An image that the model is to see: by its blob, or with its bytes where it lies in none."""
    plain = plain_media_type(media_type)
    if blob_id:
        return ResultImage(plain, blob_id=blob_id, size_bytes=len(content))
    return ResultImage(plain, b64encode(content).decode())


def within(images: Sequence[ResultImage], limit: int) -> tuple[ResultImage, ...]:
    """The images, of which the model sees the first alone where all together have more than ``limit`` bytes. One that
    lies in no blob and is not seen is none any more."""
    kept: list[ResultImage] = []
    for image in images:
        size = image.size_bytes or len(image.base64) * 3 // 4
        if size <= limit:
            limit -= size
            kept.append(image)
        elif image.blob_id:
            kept.append(ResultImage(image.media_type, blob_id=image.blob_id))
    return tuple(kept)
