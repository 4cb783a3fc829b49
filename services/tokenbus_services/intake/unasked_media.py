"""Images that no user put into the conversation: a tool returned them, or the model made them.

The caller cannot choose their format, so they never end a run. An image that this provider does not take, because of
its type, its size or the number of images, is left out with a note; so is one whose blob is gone. In a tool's result, a
short text replaces it, so that the model knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from tokenbus.blobs import plain_media_type
from tokenbus.events.requests import (
    Base64Source,
    BlobSource,
    ContentPart,
    Generate,
    ImagePart,
    Message,
    TextPart,
    ToolResultPart,
)
from tokenbus.providers.media import MediaLimits
from tokenbus_services.media.locate import Media
from tokenbus_services.media.provider_limits import base64_bytes, takes_type

LEFT_OUT = "[an image is left out here: {}]"


class CallInput(msgspec.Struct, frozen=True):
    """The input of a provider call."""

    request: Generate
    history: list[Message]
    notes: tuple[str, ...] = ()
    """Notes on what was left out."""

    def without(self, reasons: Mapping[str, str]) -> CallInput:
        """Return the turn without the images at these places. ``reasons``: the reason by place."""
        if not reasons:
            return self
        messages = [_without(m, f"messages[{i}]", reasons) for i, m in enumerate(self.request.messages)]
        history = [_without(m, f"history[{i}]", reasons) for i, m in enumerate(self.history)]
        notes = [f"{where}: the image was left out: {reason}" for where, reason in reasons.items()]
        request = msgspec.structs.replace(self.request, messages=messages)
        return CallInput(request, history, (*self.notes, *notes))


def model_and_tool_images(turn: CallInput) -> dict[str, ImagePart]:
    """Return such images by place, in order."""
    found: dict[str, ImagePart] = {}
    for root, messages in (("messages", turn.request.messages), ("history", turn.history)):
        for i, message in enumerate(messages):
            for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
                where = f"{root}[{i}].content[{j}]"
                if isinstance(part, ImagePart) and message.role == "assistant":
                    found[where] = part
                elif isinstance(part, ToolResultPart) and not isinstance(part.content, str):
                    images = ((k, inner) for k, inner in enumerate(part.content) if isinstance(inner, ImagePart))
                    found |= {f"{where}.content[{k}]": inner for k, inner in images}
    return found


def refused_media(limits: MediaLimits, turn: CallInput, media: Mapping[str, Media]) -> dict[str, str]:
    """Return which of them the provider does not take, and why. ``media``: all media of the turn. If there are too
    many images, the oldest are left out.
    """
    images = model_and_tool_images(turn)
    reasons = {where: why for where, image in images.items() if (why := _reason(limits, image))}
    if limits.images is not None:
        shown = sum(isinstance(part, ImagePart) for part in media.values()) - len(reasons)
        left = [where for where in images if where not in reasons]
        for where in left[: max(0, shown - limits.images)]:
            reasons[where] = f"this provider takes {limits.images} images in a request"
    return reasons


def _reason(limits: MediaLimits, image: ImagePart) -> str | None:
    source = image.source
    if not isinstance(source, Base64Source | BlobSource):
        return None
    if not takes_type(source.media_type, limits.image_types):
        return f"this provider takes no image of type {plain_media_type(source.media_type)!r}"
    size = base64_bytes(source.data) if isinstance(source, Base64Source) else source.size_bytes or 0
    if limits.image_bytes is not None and size > limits.image_bytes:
        return f"it has {size} bytes, this provider takes at most {limits.image_bytes}"
    return None


def _without(message: Message, where: str, reasons: Mapping[str, str]) -> Message:
    if isinstance(message.content, str) or not any(place.startswith(f"{where}.") for place in reasons):
        return message
    content = [_replaced(part, f"{where}.content[{j}]", reasons) for j, part in enumerate(message.content)]
    return msgspec.structs.replace(message, content=content)


def _replaced(part: ContentPart, where: str, reasons: Mapping[str, str]) -> ContentPart:
    if where in reasons:
        return TextPart(text="")  # empty, so that the places of later parts stay the same
    if not isinstance(part, ToolResultPart) or isinstance(part.content, str):
        return part
    inside = [
        TextPart(text=LEFT_OUT.format(reasons[at])) if (at := f"{where}.content[{k}]") in reasons else inner
        for k, inner in enumerate(part.content)
    ]
    return msgspec.structs.replace(part, content=_only_text(inside))


def _only_text(content: Sequence[TextPart | ImagePart]) -> str | list[TextPart | ImagePart]:
    """Join text-only content into one text, which every API accepts in a result."""
    texts = [part.text for part in content if isinstance(part, TextPart)]
    return "\n".join(texts) if len(texts) == len(content) else list(content)
