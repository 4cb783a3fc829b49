"""Media limits of each provider API, from its documentation, checked before a call is made.

A vendor that accepts more or less than its API sets its limits in ``[providers.NAME.media]``. If an API's documents
disagree, the larger number is used, because nothing rejected here reaches the provider. Limits that depend on the
content (pixels, pages) are left to the provider.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tokenbus.blobs import plain_media_type
from tokenbus.core.image_header import decoded_size
from tokenbus.errors import RequestInvalid
from tokenbus.events.quirks import ApiName
from tokenbus.events.requests import Base64Source, BlobSource, ImagePart, UrlSource
from tokenbus.providers import registry
from tokenbus.providers.media import MediaLimits
from tokenbus.providers.request.images import MASK
from tokenbus_services.media.locate import Media
from tokenbus_services.settings import MediaSettings


def limits_of(api: ApiName, own: MediaSettings) -> MediaLimits:
    """A vendor's limits: its own, or its API's for those it does not set."""
    fields = {name: getattr(own, name) for name in MediaSettings.__struct_fields__}
    own_limits = {name: value for name, value in fields.items() if value is not None}
    return msgspec.structs.replace(registry.get(api).media, **own_limits)


def check_media(limits: MediaLimits, media: Iterable[tuple[str, Media]]) -> None:
    """Check type, number and base64 size of media. Raises RequestInvalid, naming the location.

    A blob's size is known only to its store.
    """
    images = 0
    for where, part in media:
        is_image = isinstance(part, ImagePart)
        types = limits.image_types if is_image else limits.document_types
        source = part.source
        if isinstance(source, Base64Source | BlobSource) and not takes_type(source.media_type, types):
            problem = (
                f"this provider accepts no {_name(part)} of type {source.media_type!r}, only {', '.join(types or ())}"
            )
            raise RequestInvalid(f"{where}.source.media_type", problem)
        if isinstance(source, Base64Source):
            check_size(limits, where, part, decoded_size(source.data))
        images += is_image and where != MASK
        if limits.images is not None and images > limits.images:
            raise RequestInvalid(where, f"this provider accepts at most {limits.images} images per request")


def check_size(limits: MediaLimits, where: str, part: Media, size: int) -> None:
    """Raise RequestInvalid if the media is too large for the provider. ``size`` in bytes, before base64."""
    if isinstance(part, ImagePart):
        bounds = [limits.image_bytes]
    else:
        media_type = None if isinstance(part.source, UrlSource) else part.source.media_type
        is_pdf = media_type is not None and plain_media_type(media_type) == "application/pdf"
        bounds = [limits.document_bytes, limits.pdf_bytes if is_pdf else None]
    most = min((bound for bound in bounds if bound is not None), default=None)
    if most is not None and size > most:
        raise RequestInvalid(where, f"the {_name(part)} has {size} bytes; this provider accepts at most {most}")


def check_body(limits: MediaLimits, size: int) -> None:
    """Raise RequestInvalid if the body is too large for the provider. ``size`` in bytes."""
    if limits.request_bytes is not None and size > limits.request_bytes:
        problem = f"the request with its media has {size} bytes; this provider accepts at most {limits.request_bytes}"
        raise RequestInvalid("messages", problem)


def takes_type(media_type: str, types: tuple[str, ...] | None) -> bool:
    """Whether a type, in any spelling, matches one of these patterns; None: all types match."""
    plain = plain_media_type(media_type)
    whole = f"{plain.partition('/')[0]}/*"
    return types is None or any(one in (plain, whole, "*") for one in types)


def _name(part: Media) -> str:
    return "image" if isinstance(part, ImagePart) else "document"
