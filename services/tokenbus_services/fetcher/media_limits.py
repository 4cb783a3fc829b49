"""What media each provider API takes, as its own documents say; checked before a call is made.

A vendor that speaks an API but takes more or less of it says so in its table ``[providers.NAME.media]``. Where the
documents of an API differ, the wider number stands here: what is refused here, no provider gets to judge. What only
the content tells (pixels, pages) is the provider's to judge anyway.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tokenbus.errors import RequestInvalid
from tokenbus.events.requests import Base64Source, BlobSource, ImagePart, UrlSource
from tokenbus.events.vendor import ApiName
from tokenbus.providers.images import MASK
from tokenbus_services.fetcher.media_places import Media
from tokenbus_services.settings import MediaSettings

MIB = 2**20
_IMAGES = ("image/png", "image/jpeg", "image/webp", "image/gif")
_ANY = ("*",)

DOCUMENTED: dict[ApiName, MediaSettings] = {
    # https://platform.claude.com/docs/en/build-with-claude/vision, "Maximum size": four types, 10 MB of base64 an image
    # (5 MB on Bedrock and Google Cloud), 600 images (100 for models of a 200k context); …/pdf-support: 32 MB a request.
    "anthropic": MediaSettings(
        image_types=_IMAGES,
        document_types=("application/pdf", "text/*"),
        image_bytes=10 * MIB * 3 // 4,
        images=600,
        request_bytes=32 * MIB,
    ),
    # https://developers.openai.com/api/docs/guides/images-vision, "Image input requirements": four types, 1,500 images
    # and 512 MB a request (50 MB and 500 in 2025). …/guides/file-inputs and …/guides/pdf-files: Chat Completions takes
    # PDF alone; each file, and all of a request together, under 50 MB.
    "openai-chat": MediaSettings(
        image_types=_IMAGES,
        document_types=("application/pdf",),
        document_bytes=50 * MIB,
        images=1500,
        request_bytes=512 * MIB,
    ),
    # The same guides: the Responses API takes texts, sheets and slides as well.
    "openai-responses": MediaSettings(
        image_types=_IMAGES, document_types=_ANY, document_bytes=50 * MIB, images=1500, request_bytes=512 * MIB
    ),
    # https://developers.openai.com/api/reference/resources/images/methods/edit: three types, 50 MB an image, 16 of them
    # beside the mask.
    "openai-images": MediaSettings(
        image_types=("image/png", "image/jpeg", "image/webp"),
        document_types=(),
        image_bytes=50 * MIB,
        images=16,
        request_bytes=512 * MIB,
    ),
    # https://ai.google.dev/gemini-api/docs/file-input-methods, "Input method comparison": 100 MB a request (20 MB until
    # January 2026), 50 MB a PDF, 2 GB by the File API; …/image-understanding: five types, 3,600 images. Sound and film
    # are documents here: the API takes many types of them.
    "gemini": MediaSettings(
        image_types=("image/png", "image/jpeg", "image/webp", "image/heic", "image/heif"),
        document_types=_ANY,
        document_bytes=2 * 10**9,
        pdf_bytes=50 * MIB,
        images=3600,
        request_bytes=100 * MIB,
    ),
}


def limits_of(api: ApiName, own: MediaSettings) -> MediaSettings:
    """The limits of a vendor: its own, and its API's where it has none."""
    fields = {name: getattr(own, name) for name in MediaSettings.__struct_fields__}
    return msgspec.structs.replace(DOCUMENTED[api], **{name: v for name, v in fields.items() if v is not None})


def check_media(limits: MediaSettings, media: Iterable[tuple[str, Media]]) -> None:
    """Raises RequestInvalid, naming the place, for a type or a number that the provider does not take, and for base64
    that is too large. How large a blob is, only its store knows."""
    images = 0
    for where, part in media:
        is_image = isinstance(part, ImagePart)
        types = limits.image_types if is_image else limits.document_types
        source = part.source
        if isinstance(source, Base64Source | BlobSource) and not _taken(source.media_type, types):
            problem = (
                f"this provider takes no {_name(part)} of type {source.media_type!r}, only {', '.join(types or ())}"
            )
            raise RequestInvalid(f"{where}.source.media_type", problem)
        if isinstance(source, Base64Source):
            check_size(limits, where, part, len(source.data) * 3 // 4 - source.data[-2:].count("="))
        images += is_image and where != MASK
        if limits.images is not None and images > limits.images:
            raise RequestInvalid(where, f"this provider takes {limits.images} images in a request")


def check_size(limits: MediaSettings, where: str, part: Media, size: int) -> None:
    """Raises RequestInvalid for media that are too large for the provider. ``size`` in bytes, before base64."""
    if isinstance(part, ImagePart):
        bounds = [limits.image_bytes]
    else:
        media_type = None if isinstance(part.source, UrlSource) else part.source.media_type
        is_pdf = media_type is not None and plain_type(media_type) == "application/pdf"
        bounds = [limits.document_bytes, limits.pdf_bytes if is_pdf else None]
    most = min((bound for bound in bounds if bound is not None), default=None)
    if most is not None and size > most:
        raise RequestInvalid(where, f"the {_name(part)} has {size} bytes, this provider takes {most} at the most")


def check_body(limits: MediaSettings, size: int) -> None:
    """Raises RequestInvalid for a body that is too large for the provider. ``size`` in bytes."""
    if limits.request_bytes is not None and size > limits.request_bytes:
        problem = f"with its media the request has {size} bytes, this provider takes {limits.request_bytes} at the most"
        raise RequestInvalid("messages", problem)


def plain_type(media_type: str) -> str:
    """The type without parameters, in one spelling; ``image/jpg``, which many write, is ``image/jpeg``."""
    plain = media_type.partition(";")[0].strip().lower()
    return "image/jpeg" if plain == "image/jpg" else plain


def _name(part: Media) -> str:
    return "image" if isinstance(part, ImagePart) else "document"


def _taken(media_type: str, types: tuple[str, ...] | None) -> bool:
    plain = plain_type(media_type)
    whole = f"{plain.partition('/')[0]}/*"
    return types is None or any(one in (plain, whole, "*") for one in types)
