"""OpenAI's Images API, and those who speak it: one prompt in, images out."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from tokenbus.events.requests import Generate, Message, Mode
from tokenbus.providers.api import ApiName, Built, Decoder, Format, Provider, Quirks
from tokenbus.providers.building import formatted
from tokenbus.providers.files import FileApi
from tokenbus.providers.openai_images.request import build
from tokenbus.providers.openai_images.stream import ImagesDecoder
from tokenbus.providers.sse import MAX_IMAGE_EVENT_BYTES, SseDecoder


class OpenAIImages:
    """The Images API as a `tokenbus.providers.api.Provider`."""

    name: ApiName = "openai-images"
    key_header: tuple[str, str] = ("authorization", "Bearer {}")
    default_base_url = "https://api.openai.com/v1"
    default_key_env = "OPENAI_API_KEY"
    urgent: tuple[bytes, ...] = (b".partial_image", b".completed", b'"error"')
    files: FileApi | None = None
    last: tuple[bytes, ...] = (b'data:{"type":"error"', b'data:{"error":{"')
    image_keys: re.Pattern[bytes] | None = re.compile(rb'"b64_json"\s{0,32}:\s{0,32}"')
    formats: Mapping[Mode, Format] = {"chat": build}

    def build(self, request: Generate, history: list[Message], quirks: Quirks) -> Built:
        """See `Provider.build`."""
        return formatted(self.formats, request, history, quirks, makes_images=True)

    def decoder(self, *, status: int, headers: Mapping[str, str], stream: bool, quirks: Quirks) -> Decoder:
        """See `Provider.decoder`."""
        return ImagesDecoder.of(status, headers, sse=SseDecoder(limit=MAX_IMAGE_EVENT_BYTES))

    def restore(self, state: bytes) -> Decoder:
        """See `Provider.restore`."""
        return msgspec.msgpack.decode(state, type=ImagesDecoder)


provider: Provider = OpenAIImages()
