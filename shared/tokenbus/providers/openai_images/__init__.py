"""OpenAI's Images API and compatible services: one prompt in, images out."""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw

from tokenbus.blobs import parse_media_type
from tokenbus.errors import BlobRefused, Malformed, RequestInvalid
from tokenbus.events import normalized as n
from tokenbus.events.frames import ImagesRequested
from tokenbus.events.requests import Base64Source, Generate, ImageOptions, ImagePart, Message, Mode, TextPart
from tokenbus.providers.api import ApiName, Built, Format, HttpCall, Provider, Quirks
from tokenbus.providers.base import ProviderBase
from tokenbus.providers.media import MIB, MediaLimits
from tokenbus.providers.openai_responses.output import media_type
from tokenbus.providers.openai_responses.stream import usage_of
from tokenbus.providers.request.build import json_call, with_extra
from tokenbus.providers.request.images import (
    MASK,
    image_fields,
    image_options,
    image_reference,
    images_asked,
    prompt_of,
)
from tokenbus.providers.request.multipart import File, form
from tokenbus.providers.response.decoder import ResponseDecoder
from tokenbus.providers.response.error_mapping import provider_failure
from tokenbus.providers.response.json_decode import read, text_of
from tokenbus.providers.response.sse import MAX_IMAGE_EVENT_BYTES, SseEvent
from tokenbus.providers.response.unknown_fields import NOTHING, Known, has_value, named, read_known
from tokenbus.providers.response.usage import latest


class _ImageData(Known):
    """An image in a whole response."""

    b64_json: str | None = None
    url: str | None = None
    revised_prompt: str | None = None


class _Event(Known):
    """The needed fields of an event, a whole response or an error."""

    type: str = ""
    b64_json: str | None = None
    revised_prompt: str | None = None
    output_format: str | None = None
    size: str | None = None
    quality: str | None = None
    usage: dict[str, Any] | None = None
    data: list[_ImageData] | None = None
    error: Any = None
    created: Raw = NOTHING
    created_at: Raw = NOTHING
    partial_image_index: Raw = NOTHING
    background: Raw = NOTHING


_decoder = msgspec.json.Decoder(_Event)
_anything = msgspec.json.Decoder()


class ImagesDecoder(ResponseDecoder, kw_only=True):
    """Decodes one response; see `tokenbus.providers.api.Decoder`.

    - Each image is a block. Previews belong to the one open image, because the API makes images one after the other.
    - The API sends no event after the last image. The response is complete if the body ends with no image open.
    - An image given by URL (older models) is emitted as is and never fetched here.
    """

    ordinal: int = 0
    """Ordinal of the open image, or of the next one."""
    open: bool = False
    usage: dict[str, object] | None = None

    def _read(self, event: SseEvent, out: list[n.Normalized]) -> n.Terminal | None:
        if event.data.startswith(b"[DONE]"):
            return None
        parsed, unknown = read_known(_decoder, _Event, event.data, "event")
        if parsed.error is not None or parsed.type == "error":
            return n.Failed(provider_failure(read(_anything, event.data, "event")))
        if not self.started:
            self.started = True
            out.append(n.Start(""))
        match parsed.type.rpartition(".")[2]:
            case "partial_image":
                self._image(parsed, _ImageData(parsed.b64_json), out, final=False)
            case "completed":
                self._image(parsed, _ImageData(parsed.b64_json, revised_prompt=parsed.revised_prompt), out, final=True)
                self._count(parsed, out)
            case "" if parsed.data is not None:
                for made in parsed.data:
                    self._image(parsed, made, out, final=True)
                self._count(parsed, out)
            case "":
                raise Malformed("event", "neither a type nor images")
            case _:
                out.append(n.Extra(f"openai-images.{parsed.type}", event.data.decode()))
                return None
        if has_value(parsed.background):
            self._note({"openai-images.background": text_of(parsed.background)})
        self._note(named("openai-images", unknown))
        return None

    def _closed(self, out: list[n.Normalized]) -> n.Terminal:
        if self.open:
            return n.Cut("the stream ended before the image was complete")
        if not self.ordinal:
            return n.Cut("the body held no image")
        return n.Done("stop", usage=usage_of(self.usage) if self.usage else None)

    def _image(self, parsed: _Event, made: _ImageData, out: list[n.Normalized], *, final: bool) -> None:
        if not self.open:
            self.open = True
            out.append(n.BlockStart(self.ordinal, "image"))
        if made.b64_json:
            image = n.Image(
                self.ordinal,
                media_type(parsed.output_format),
                made.b64_json,
                final,
                revised_prompt=made.revised_prompt or "",
                size=parsed.size or "",
                quality=parsed.quality or "",
            )
            out.append(image)
        elif made.url:
            out.append(n.Extra("openai-images.url", msgspec.json.encode(made.url).decode(), self.ordinal))
        if final:
            out.append(n.BlockStop(self.ordinal))
            self.open = False
            self.ordinal += 1

    def _count(self, parsed: _Event, out: list[n.Normalized]) -> None:
        if parsed.usage:
            self.usage = latest(self.usage, parsed.usage)
            out.append(n.UsageSeen(usage_of(self.usage)))


_UNKNOWN = ("system", "tools", "tool_choice", "max_tokens", "temperature", "top_p", "stop", "thinking", "output_schema")
"""Request fields that this API does not support."""


def build(request: Generate, history: list[Message], quirks: Quirks) -> Built:
    """Build the HTTP call; a prompt with images becomes an edit. Raises RequestInvalid, naming the field."""
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
    return Built(call=json_call("/images/generations", with_extra(body, request.extra)))


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


PATH = "/images/edits"
_ENDINGS = {"jpeg": "jpg"}
"""File extensions for media types whose subtype is not the extension."""

Json = dict[str, object]


def edit(body: Json, images: Mapping[str, ImagePart], mask: ImagePart | None, extra: Json | None) -> HttpCall:
    """Build the call. ``images`` are keyed by location in the request. Raises RequestInvalid.

    The API has two forms (https://developers.openai.com/api/reference/resources/images/methods/edit): a multipart form,
    which every compatible vendor supports; and JSON with references, the only one that takes a URL or file id, limited
    to 20 MiB of base64 per image. Images are sent as files unless at least one is given only by reference.
    """
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
        return json_call(PATH, with_extra(body | named, extra))
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


class OpenAIImages(ProviderBase):
    """The Images API as a `tokenbus.providers.api.Provider`."""

    name: ApiName = "openai-images"
    decodes = ImagesDecoder
    event_bytes = MAX_IMAGE_EVENT_BYTES
    default_base_url = "https://api.openai.com/v1"
    default_key_env = "OPENAI_API_KEY"
    urgent: tuple[bytes, ...] = (b".partial_image", b".completed", b'"error"')
    last: tuple[bytes, ...] = (b'data:{"type":"error"', b'data:{"error":{"')
    image_keys: re.Pattern[bytes] | None = re.compile(rb'"b64_json"\s{0,32}:\s{0,32}"')
    formats: Mapping[Mode, Format] = {"chat": build}
    # https://developers.openai.com/api/reference/resources/images/methods/edit: three types, 50 MB per image, 16 images
    # in addition to the mask.
    media = MediaLimits(
        image_types=("image/png", "image/jpeg", "image/webp"),
        document_types=(),
        image_bytes=50 * MIB,
        images=16,
        request_bytes=512 * MIB,
    )
    makes_images = True
    takes_max_tokens = False
    options = frozenset({"user_id"})

    def images_asked(self, request: Generate) -> ImagesRequested:
        return images_asked(request, own_model=True, prompt=prompt_of(request))


provider: Provider = OpenAIImages()
