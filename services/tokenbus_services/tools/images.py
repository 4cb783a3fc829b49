"""Images in tool results: decides which ones the model sees, in addition to the note in the text."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence

from tokenbus.blobs import plain_media_type
from tokenbus.events.frames import ResultImage

SHOWN_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")
"""The image types that all provider APIs accept."""


def is_shown(media_type: str) -> bool:
    """Whether models can view images of this type."""
    return plain_media_type(media_type) in SHOWN_TYPES


def shown(content: bytes, media_type: str, blob_id: str | None) -> ResultImage:
    """An image for the model: by its blob, or with its bytes if it is in none."""
    plain = plain_media_type(media_type)
    if blob_id:
        return ResultImage(plain, blob_id=blob_id, size_bytes=len(content))
    return ResultImage(plain, b64encode(content).decode())


def within(images: Sequence[ResultImage], limit: int) -> tuple[ResultImage, ...]:
    """Limit the images that the model sees to ``limit`` bytes in total, in order. The others are kept only if they are
    in a blob.
    """
    kept: list[ResultImage] = []
    for image in images:
        size = image.size_bytes or len(image.base64) * 3 // 4
        if size <= limit:
            limit -= size
            kept.append(image)
        elif image.blob_id:
            kept.append(ResultImage(image.media_type, blob_id=image.blob_id))
    return tuple(kept)
