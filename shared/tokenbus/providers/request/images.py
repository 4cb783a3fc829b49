"""How a request asks for images, for the APIs that make some."""

from __future__ import annotations

from tokenbus.errors import RequestInvalid
from tokenbus.events.frames import ImagesAsked
from tokenbus.events.requests import (
    BlobSource,
    FileSource,
    Generate,
    ImageOptions,
    ImagePart,
    TextPart,
)
from tokenbus.providers.request.build import data_url

MASK = "images.mask"
"""The mask's place in a request."""


def image_options(request: Generate, *known: str) -> ImageOptions | None:
    """What the request asks of images. Raises RequestInvalid for an option that is not among those that the API has."""
    asked, unasked = request.images, ImageOptions()
    for name in ImageOptions.__struct_fields__ if asked else ():
        if name not in (*known, "deliver") and getattr(asked, name) != getattr(unasked, name):
            raise RequestInvalid(f"images.{name}", "this provider API has no such option")
    if asked and asked.previews and not request.stream:
        raise RequestInvalid("images.previews", "previews come in a stream alone, and `stream` is false")
    return asked


def image_fields(images: ImageOptions) -> dict[str, object]:
    """The options as both of OpenAI's APIs name them."""
    said = {
        "model": images.model,
        "size": images.size,
        "quality": images.quality,
        "output_format": images.format,
        "background": images.background,
        "partial_images": images.previews or None,
    }
    return {name: value for name, value in said.items() if value is not None}


def image_reference(where: str, image: ImagePart) -> dict[str, object]:
    """An image beside the conversation, as both of OpenAI's APIs name it in JSON. Raises RequestInvalid for one that is
    still in the blob store."""
    match image.source:
        case FileSource(file_id=file_id):
            return {"file_id": file_id}
        case BlobSource():
            raise RequestInvalid(where, "media from the blob store was not loaded")
        case source:
            return {"image_url": data_url(source)}


def images_asked(request: Generate, *, own_model: bool = False, prompt: str = "") -> ImagesAsked:
    """What goes with the answer's bytes to whoever reads them: an answer does not repeat all that was asked.

    ``own_model``: the request's model makes the images itself; ``prompt``: what all of them are made from.
    """
    asked = request.images or ImageOptions()
    return ImagesAsked(
        inline=asked.deliver == "base64",
        prompt=prompt,
        model=asked.model or (request.model if own_model else ""),
        size=_told(asked.size),
        quality=_told(asked.quality),
    )


def prompt_of(request: Generate) -> str:
    """The text of the last message."""
    content = request.messages[-1].content
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content if isinstance(part, TextPart))


def _told(word: str | None) -> str:
    """A word that says something of the image; "auto" says nothing."""
    return "" if word in (None, "auto") else word
