"""An edit: images to work from go with the prompt, and a mask if there is one.

Two ways (https://developers.openai.com/api/reference/resources/images/methods/edit): a form with files, which every
vendor of this API knows; and JSON with references, the only one that takes a URL or the id of a file, in which an image
has 20 MiB of base64 at the most. So images go as files, and as references where one of them is named alone.
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
"""Where a file's name does not end with the subtype of its media type."""

Json = dict[str, object]


def edit(body: Json, images: Mapping[str, ImagePart], mask: ImagePart | None, extra: Json | None) -> HttpCall:
    """The call. ``images`` by their places in the request. Raises RequestInvalid."""
    sent = {**images, MASK: mask} if mask else images
    at_hand = {where: image.source for where, image in sent.items() if isinstance(image.source, Base64Source)}
    if MASK in at_hand and _media_type(MASK, at_hand[MASK]) != "image/png":
        raise RequestInvalid(f"{MASK}.source.media_type", "a mask is a PNG: its transparent parts are what may change")
    if len(at_hand) < len(sent):
        named: Json = {"images": [image_reference(where, image) for where, image in images.items()]}
        if mask:
            named["mask"] = image_reference(MASK, mask)
        encoded = msgspec.json.encode(with_extra(body | named, extra))
        return HttpCall(path=PATH, body=encoded, headers={"content-type": "application/json"})
    # As OpenAI's SDK names them: vendors that take one image alone know no list.
    field = "image" if len(images) == 1 else "image[]"
    files = [_file("mask" if where == MASK else field, where, source) for where, source in at_hand.items()]
    content_type, content = form(with_extra(body, extra), files)
    return HttpCall(path=PATH, body=content, headers={"content-type": content_type})


def _file(field: str, where: str, source: Base64Source) -> File:
    """The file, whose name says what is in it: some vendors go by that."""
    media_type = _media_type(where, source)
    subtype = media_type.partition("/")[2]
    try:
        content = b64decode(source.data, validate=True)
    except ValueError:  # binascii's, or for what is no ASCII
        raise RequestInvalid(f"{where}.source.data", "it is no base64") from None
    return File(field, f"image.{_ENDINGS.get(subtype, subtype)}", media_type, content)


def _media_type(where: str, source: Base64Source) -> str:
    """Without parameters."""
    try:
        plain = parse_media_type(source.media_type).partition(";")[0]
    except BlobRefused as e:
        raise RequestInvalid(f"{where}.source.media_type", e.problem) from None
    return "image/jpeg" if plain == "image/jpg" else plain
