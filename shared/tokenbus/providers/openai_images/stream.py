"""Decodes Images API responses, streamed or whole, into normalized events.

- Each image is a block. Previews belong to the one open image, because the API makes images one after the other.
- The API sends no event after the last image. The response is complete if the body ends with no image open.
- An image given by URL (older models) is emitted as is and never fetched here.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from tokenbus.errors import Malformed
from tokenbus.events.normalized import (
    BlockStart,
    BlockStop,
    Cut,
    Done,
    Extra,
    Failed,
    Image,
    Normalized,
    Start,
    Terminal,
    UsageSeen,
)
from tokenbus.providers.openai_responses.output import media_type
from tokenbus.providers.openai_responses.stream import usage_of
from tokenbus.providers.response.decoder import ResponseDecoder
from tokenbus.providers.response.error_mapping import provider_failure
from tokenbus.providers.response.json_decode import read, text_of
from tokenbus.providers.response.sse import SseEvent
from tokenbus.providers.response.unknown_fields import Known, has_value, named, read_known
from tokenbus.providers.response.usage import latest

NOTHING = Raw(b"")
"""An absent field of raw JSON."""


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
    """Decodes one Images API response; see `tokenbus.providers.api.Decoder`."""

    ordinal: int = 0
    """Ordinal of the open image, or of the next one."""
    open: bool = False
    usage: dict[str, object] | None = None

    def _read(self, event: SseEvent, out: list[Normalized]) -> Terminal | None:
        if event.data.startswith(b"[DONE]"):
            return None
        parsed, unknown = read_known(_decoder, _Event, event.data, "event")
        if parsed.error is not None or parsed.type == "error":
            return Failed(provider_failure(read(_anything, event.data, "event")))
        if not self.started:
            self.started = True
            out.append(Start(""))
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
                out.append(Extra(f"openai-images.{parsed.type}", event.data.decode()))
                return None
        if has_value(parsed.background):
            self._note({"openai-images.background": text_of(parsed.background)})
        self._note(named("openai-images", unknown))
        return None

    def _closed(self, out: list[Normalized]) -> Terminal:
        if self.open:
            return Cut("the stream ended before the image was complete")
        if not self.ordinal:
            return Cut("the body held no image")
        return Done("stop", usage=usage_of(self.usage) if self.usage else None)

    def _image(self, parsed: _Event, made: _ImageData, out: list[Normalized], *, final: bool) -> None:
        if not self.open:
            self.open = True
            out.append(BlockStart(self.ordinal, "image"))
        if made.b64_json:
            image = Image(
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
            out.append(Extra("openai-images.url", msgspec.json.encode(made.url).decode(), self.ordinal))
        if final:
            out.append(BlockStop(self.ordinal))
            self.open = False
            self.ordinal += 1

    def _count(self, parsed: _Event, out: list[Normalized]) -> None:
        if parsed.usage:
            self.usage = latest(self.usage, parsed.usage)
            out.append(UsageSeen(usage_of(self.usage)))
