"""Image options in requests, for the APIs that generate images."""

from __future__ import annotations

from tokenbus.errors import RequestInvalid
from tokenbus.events.frames import ImagesRequested
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
"""Location of the mask in a request, for error messages."""


def image_options(request: Generate, *known: str) -> ImageOptions | None:
    """Return the request's image options. Raises RequestInvalid for options that this API does not have."""
    options, defaults = request.images, ImageOptions()
    for name in ImageOptions.__struct_fields__ if options else ():
        if name not in (*known, "deliver") and getattr(options, name) != getattr(defaults, name):
            raise RequestInvalid(f"images.{name}", "this provider API does not have this option")
    if options and options.previews and not request.stream:
        raise RequestInvalid("images.previews", "previews require `stream: true`")
    return options


def image_fields(images: ImageOptions) -> dict[str, object]:
    """The options under the field names of both OpenAI APIs."""
    payload = {
        "model": images.model,
        "size": images.size,
        "quality": images.quality,
        "output_format": images.format,
        "background": images.background,
        "partial_images": images.previews or None,
    }
    return {name: value for name, value in payload.items() if value is not None}


def image_reference(where: str, image: ImagePart) -> dict[str, object]:
    """A reference image in the JSON form of both OpenAI APIs. Raises RequestInvalid if it is still in the blob
    store."""
    match image.source:
        case FileSource(file_id=file_id):
            return {"file_id": file_id}
        case BlobSource():
            raise RequestInvalid(where, "media from the blob store was not loaded")
        case source:
            return {"image_url": data_url(source)}


def images_asked(request: Generate, *, own_model: bool = False, prompt: str = "") -> ImagesRequested:
    """Return the image options that travel with the response bytes; the response does not repeat all of them.

    ``own_model``: the requested model generates the images itself. ``prompt``: the prompt of all images.
    """
    options = request.images or ImageOptions()
    return ImagesRequested(
        inline=options.deliver == "base64",
        prompt=prompt,
        model=options.model or (request.model if own_model else ""),
        size=_explicit(options.size),
        quality=_explicit(options.quality),
    )


def prompt_of(request: Generate) -> str:
    """Return the text of the last message."""
    content = request.messages[-1].content
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content if isinstance(part, TextPart))


def _explicit(word: str | None) -> str:
    """Return the option unless it is "auto", which carries no information."""
    return "" if word in (None, "auto") else word
