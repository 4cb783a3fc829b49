"""The answer of the Images API, streamed or whole, as normalised events.

- An image is a block. Its previews belong to the one image that is open: the API makes them one after the other.
- A stream ends after its last image without a word, so it is done where its body ends and no image is open.
- An image by its URL (older models) is told as it is: nothing here fetches it.
"""

from __future__ import annotations

from typing import Any

import msgspec

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
from tokenbus.providers.response.json_decode import read
from tokenbus.providers.response.sse import SseEvent
from tokenbus.providers.response.usage import latest


class _Made(msgspec.Struct):
    """An image of a whole answer."""

    b64_json: str | None = None
    url: str | None = None
    revised_prompt: str | None = None


class _Said(msgspec.Struct):
    """An event, a whole answer, or an error: of all of them what is needed."""

    type: str = ""
    b64_json: str | None = None
    revised_prompt: str | None = None
    output_format: str | None = None
    size: str | None = None
    quality: str | None = None
    usage: dict[str, Any] | None = None
    data: list[_Made] | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Said)
_anything = msgspec.json.Decoder()


class ImagesDecoder(ResponseDecoder, kw_only=True):
    """One answer of the Images API; see `tokenbus.providers.api.Decoder`."""

    started: bool = False
    ordinal: int = 0
    """Of the image that is open, or of the next one."""
    open: bool = False
    usage: dict[str, object] | None = None

    def _read(self, event: SseEvent, out: list[Normalized]) -> Terminal | None:
        if event.data.startswith(b"[DONE]"):
            return None
        said = read(_decoder, event.data, "event")
        if said.error is not None or said.type == "error":
            return Failed(provider_failure(read(_anything, event.data, "event")))
        if not self.started:
            self.started = True
            out.append(Start(""))
        match said.type.rpartition(".")[2]:
            case "partial_image":
                self._image(said, _Made(said.b64_json), out, final=False)
            case "completed":
                self._image(said, _Made(said.b64_json, revised_prompt=said.revised_prompt), out, final=True)
                self._count(said, out)
            case "" if said.data is not None:
                for made in said.data:
                    self._image(said, made, out, final=True)
                self._count(said, out)
            case "":
                raise Malformed("event", "it has no type, and no images")
            case _:
                out.append(Extra(f"openai-images.{said.type}", event.data.decode()))
        return None

    def _closed(self, out: list[Normalized]) -> Terminal:
        if self.open:
            return Cut("the stream ended before the image was complete")
        if not self.ordinal:
            return Cut("the body held no image")
        return Done("stop", usage=usage_of(self.usage) if self.usage else None)

    def _image(self, said: _Said, made: _Made, out: list[Normalized], *, final: bool) -> None:
        if not self.open:
            self.open = True
            out.append(BlockStart(self.ordinal, "image"))
        if made.b64_json:
            image = Image(
                self.ordinal,
                media_type(said.output_format),
                made.b64_json,
                final,
                revised_prompt=made.revised_prompt or "",
                size=said.size or "",
                quality=said.quality or "",
            )
            out.append(image)
        elif made.url:
            out.append(Extra("openai-images.url", msgspec.json.encode(made.url).decode(), self.ordinal))
        if final:
            out.append(BlockStop(self.ordinal))
            self.open = False
            self.ordinal += 1

    def _count(self, said: _Said, out: list[Normalized]) -> None:
        if said.usage:
            self.usage = latest(self.usage, said.usage)
            out.append(UsageSeen(usage_of(self.usage)))
