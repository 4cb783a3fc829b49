"""What media a provider API takes, as its documents say."""

from __future__ import annotations

import msgspec

MIB = 2**20
COMMON_IMAGES = ("image/png", "image/jpeg", "image/webp", "image/gif")
ANY = ("*",)


class MediaLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What media one request may hold; None: nothing is known, and nothing is checked. What only the content tells
    (pixels, pages) is the provider's to judge."""

    image_types: tuple[str, ...] | None = None
    """As `image/png`, `image/*` or `*`."""
    document_types: tuple[str, ...] | None = None
    image_bytes: int | None = None
    """Of one image, before base64."""
    document_bytes: int | None = None
    """Of one document, before base64."""
    pdf_bytes: int | None = None
    """Of one PDF, if that is less."""
    images: int | None = None
    """How many images, those by url too."""
    request_bytes: int | None = None
    """Of the whole body."""
