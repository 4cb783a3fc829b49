"""Image edits: the prompt comes with input images and optionally a mask.

The API has two request forms (https://developers.openai.com/api/reference/resources/images/methods/edit): a multipart
form, which every compatible vendor supports; and JSON with references, the only one that takes a URL or file id,
limited to 20 MiB of base64 per image. Images are sent as files unless at least one is given only by reference.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping

import msgspec

from tokenbus.blobs import parse_media_type
from tokenbus.errors import BlobRefused, RequestInvalid
from tokenbus.events.requests import Base64Source, ImagePart
from tokenbus.providers.api import HttpCall
from tokenbus.providers.request.build import with_extra
from tokenbus.providers.request.images import MASK, image_reference
from tokenbus.providers.request.multipart import File, form

PATH = "/images/edits"
_ENDINGS = {"jpeg": "jpg"}
"""File extensions for media types whose subtype is not the extension."""

Json = dict[str, object]


def edit(body: Json, images: Mapping[str, ImagePart], mask: ImagePart | None, extra: Json | None) -> HttpCall:
    """Build the call. ``images`` are keyed by location in the request. Raises RequestInvalid."""
    sent = {**images, MASK: mask} if mask else images
    at_hand = {where: image.source for where, image in sent.items() if isinstance(image.source, Base64Source)}
    if MASK in at_hand and _media_type(MASK, at_hand[MASK]) != "image/png":
        raise RequestInvalid(
            f"{MASK}.source.media_type", "a mask must be a PNG; its transparent parts mark what to edit"
        )
    if len(at_hand) < len(sent):
        named: Json = {"images": [image_reference(where, image) for where, image in images.items()]}
        if mask:
            named["mask"] = image_reference(MASK, mask)
        encoded = msgspec.json.encode(with_extra(body | named, extra))
        return HttpCall(path=PATH, body=encoded, headers={"content-type": "application/json"})
    # As OpenAI's SDK does: vendors that accept only one image do not know the list form.
    field = "image" if len(images) == 1 else "image[]"
    files = [_file("mask" if where == MASK else field, where, source) for where, source in at_hand.items()]
    content_type, content = form(with_extra(body, extra), files)
    return HttpCall(path=PATH, body=content, headers={"content-type": content_type})


def _file(field: str, where: str, source: Base64Source) -> File:
    """Build the file part. Its name has the right extension, because some vendors go by it."""
    media_type = _media_type(where, source)
    subtype = media_type.partition("/")[2]
    try:
        content = b64decode(source.data, validate=True)
    except ValueError:  # binascii.Error, or non-ASCII input
        raise RequestInvalid(f"{where}.source.data", "not valid base64") from None
    return File(field, f"image.{_ENDINGS.get(subtype, subtype)}", media_type, content)


def _media_type(where: str, source: Base64Source) -> str:
    """The media type without parameters."""
    try:
        plain = parse_media_type(source.media_type).partition(";")[0]
    except BlobRefused as e:
        raise RequestInvalid(f"{where}.source.media_type", e.problem) from None
    return "image/jpeg" if plain == "image/jpg" else plain
