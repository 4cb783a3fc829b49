"""What media each provider API takes, as its own documents say; checked before a call is made.

A vendor that speaks an API but takes more or less of it says so in its table ``[providers.NAME.media]``. Where the
documents of an API differ, the wider number stands here: what is refused here, no provider gets to judge. What only
the content tells (pixels, pages) is the provider's to judge anyway.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tokenbus.blobs import plain_media_type
from tokenbus.errors import RequestInvalid
from tokenbus.events.quirks import ApiName
from tokenbus.events.requests import Base64Source, BlobSource, ImagePart, UrlSource
from tokenbus.providers import registry
from tokenbus.providers.media import MediaLimits
from tokenbus.providers.request.images import MASK
from tokenbus_services.media.locate import Media
from tokenbus_services.settings import MediaSettings


def limits_of(api: ApiName, own: MediaSettings) -> MediaLimits:
    """The limits of a vendor: its own, and its API's where it has none."""
    fields = {name: getattr(own, name) for name in MediaSettings.__struct_fields__}
    own_limits = {name: value for name, value in fields.items() if value is not None}
    return msgspec.structs.replace(registry.get(api).media, **own_limits)


def check_media(limits: MediaLimits, media: Iterable[tuple[str, Media]]) -> None:
    """Raises RequestInvalid, naming the place, for a type or a number that the provider does not take, and for base64
    that is too large. How large a blob is, only its store knows."""
    images = 0
    for where, part in media:
        is_image = isinstance(part, ImagePart)
        types = limits.image_types if is_image else limits.document_types
        source = part.source
        if isinstance(source, Base64Source | BlobSource) and not takes_type(source.media_type, types):
            problem = (
                f"this provider takes no {_name(part)} of type {source.media_type!r}, only {', '.join(types or ())}"
            )
            raise RequestInvalid(f"{where}.source.media_type", problem)
        if isinstance(source, Base64Source):
            check_size(limits, where, part, base64_bytes(source.data))
        images += is_image and where != MASK
        if limits.images is not None and images > limits.images:
            raise RequestInvalid(where, f"this provider takes {limits.images} images in a request")


def check_size(limits: MediaLimits, where: str, part: Media, size: int) -> None:
    """Raises RequestInvalid for media that are too large for the provider. ``size`` in bytes, before base64."""
    if isinstance(part, ImagePart):
        bounds = [limits.image_bytes]
    else:
        media_type = None if isinstance(part.source, UrlSource) else part.source.media_type
        is_pdf = media_type is not None and plain_media_type(media_type) == "application/pdf"
        bounds = [limits.document_bytes, limits.pdf_bytes if is_pdf else None]
    most = min((bound for bound in bounds if bound is not None), default=None)
    if most is not None and size > most:
        raise RequestInvalid(where, f"the {_name(part)} has {size} bytes, this provider takes {most} at the most")


def check_body(limits: MediaLimits, size: int) -> None:
    """Raises RequestInvalid for a body that is too large for the provider. ``size`` in bytes."""
    if limits.request_bytes is not None and size > limits.request_bytes:
        problem = f"with its media the request has {size} bytes, this provider takes {limits.request_bytes} at the most"
        raise RequestInvalid("messages", problem)


def base64_bytes(data: str) -> int:
    """How many bytes this base64 stands for."""
    return len(data) * 3 // 4 - data[-2:].count("=")


def takes_type(media_type: str, types: tuple[str, ...] | None) -> bool:
    """Whether one of these is the type, however it is spelled; None: all are taken."""
    plain = plain_media_type(media_type)
    whole = f"{plain.partition('/')[0]}/*"
    return types is None or any(one in (plain, whole, "*") for one in types)


def _name(part: Media) -> str:
    return "image" if isinstance(part, ImagePart) else "document"
