"""Builds an Images request: https://developers.openai.com/api/reference/resources/images/methods/generate.

The API takes one prompt and no conversation. A prompt with images becomes an edit (`edits`).
"""

from __future__ import annotations

import msgspec

from tokenbus.errors import RequestInvalid
from tokenbus.events.requests import Generate, ImageOptions, ImagePart, Message, TextPart
from tokenbus.providers.api import Built, HttpCall, Quirks
from tokenbus.providers.openai_images.edits import edit
from tokenbus.providers.request.build import with_extra
from tokenbus.providers.request.images import MASK, image_fields, image_options, prompt_of

_UNKNOWN = ("system", "tools", "tool_choice", "max_tokens", "temperature", "top_p", "stop", "thinking", "output_schema")
"""Request fields that this API does not support."""


def build(request: Generate, history: list[Message], quirks: Quirks) -> Built:
    """Build the HTTP call. Raises RequestInvalid, naming the field."""
    for name in _UNKNOWN:
        if getattr(request, name) not in (None, []):
            raise RequestInvalid(name, "the Images API does not support this field; it takes a prompt and `images`")
    prompt, images = _prompt_and_images(request)
    body: dict[str, object] = {"model": request.model, "prompt": prompt, "stream": request.stream}
    if request.user_id is not None:
        body["user"] = request.user_id
    known = ("size", "quality", "format", "background", "count", "previews", "mask")
    options = image_options(request, *known) or ImageOptions()
    body |= image_fields(options)
    if options.count > 1:
        body["n"] = options.count
    if images:
        return Built(call=edit(body, images, options.mask, request.extra))
    if options.mask:
        raise RequestInvalid(MASK, "a mask requires an image to edit")
    encoded = msgspec.json.encode(with_extra(body, request.extra))
    headers = {"content-type": "application/json"}
    return Built(call=HttpCall(path="/images/generations", body=encoded, headers=headers))


def _prompt_and_images(request: Generate) -> tuple[str, dict[str, ImagePart]]:
    """Return the prompt and the input images by location, from the single message. Raises RequestInvalid."""
    [message, *more] = request.messages
    if more or message.role != "user":
        raise RequestInvalid("messages", "the Images API takes one user message: the prompt and any images to edit")
    images: dict[str, ImagePart] = {}
    for i, part in enumerate(message.content if isinstance(message.content, list) else ()):
        match part:
            case TextPart():
                pass
            case ImagePart():
                images[f"messages[0].content[{i}]"] = part
            case _:
                raise RequestInvalid(f"messages[0].content[{i}]", "the Images API takes only text and images")
    if not (prompt := prompt_of(request)):
        raise RequestInvalid("messages[0].content", "the prompt is empty")
    return prompt, images
