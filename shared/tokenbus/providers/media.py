"""Media limits of provider APIs, taken from their documentation."""

from __future__ import annotations

import msgspec

MIB = 2**20
COMMON_IMAGES = ("image/png", "image/jpeg", "image/webp", "image/gif")
ANY = ("*",)


class MediaLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What media one request may contain. None: the limit is unknown and not checked.

    Limits that depend on the content (pixels, pages) are left to the provider.
    """

    image_types: tuple[str, ...] | None = None
    """Patterns such as `image/png`, `image/*` or `*`."""
    document_types: tuple[str, ...] | None = None
    image_bytes: int | None = None
    """Maximum size of one image, before base64."""
    document_bytes: int | None = None
    """Maximum size of one document, before base64."""
    pdf_bytes: int | None = None
    """Maximum size of one PDF, if smaller."""
    images: int | None = None
    """Maximum number of images, including those given by URL."""
    request_bytes: int | None = None
    """Maximum size of the whole body."""
