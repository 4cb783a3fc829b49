"""OpenAI's Responses API, and those who speak it."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from tokenbus.events.requests import Generate, Message, Mode
from tokenbus.providers.api import ApiName, Built, Decoder, Format, Provider, Quirks
from tokenbus.providers.building import formatted
from tokenbus.providers.files import FileApi
from tokenbus.providers.inline_thinking import InlineThinking
from tokenbus.providers.openai_responses.files import files
from tokenbus.providers.openai_responses.request import build
from tokenbus.providers.openai_responses.stream import ResponsesDecoder
from tokenbus.providers.sse import MAX_IMAGE_EVENT_BYTES, SseDecoder


class OpenAIResponses:
    """The Responses API as a `tokenbus.providers.api.Provider`."""

    name: ApiName = "openai-responses"
    key_header: tuple[str, str] = ("authorization", "Bearer {}")
    default_base_url = "https://api.openai.com/v1"
    default_key_env = "OPENAI_API_KEY"
    # Starts and ends of items, of parts and of the response; a text with such a word in it is merely forwarded sooner.
    urgent: tuple[bytes, ...] = (
        b"output_item.",
        b"content_part.",
        b"response.c",  # created, completed, cancelled
        b"response.incomplete",
        b"response.failed",
        b'"error"',
    )
    files: FileApi | None = files
    last: tuple[bytes, ...] = tuple(
        b'data:{"type":"%b"' % name
        for name in (b"response.completed", b"response.incomplete", b"response.failed", b"response.cancelled", b"error")
    )
    image_keys: re.Pattern[bytes] | None = re.compile(rb'"(?:result|partial_image_b64)"\s{0,32}:\s{0,32}"')
    formats: Mapping[Mode, Format] = {"chat": build}

    def build(self, request: Generate, history: list[Message], quirks: Quirks) -> Built:
        """See `Provider.build`."""
        return formatted(self.formats, request, history, quirks, makes_images=True)

    def decoder(self, *, status: int, headers: Mapping[str, str], stream: bool, quirks: Quirks) -> Decoder:
        """See `Provider.decoder`. A whole response says by its `object` that it is one, whatever was asked for."""
        sse = SseDecoder(limit=MAX_IMAGE_EVENT_BYTES)
        return ResponsesDecoder.of(status, headers, sse=sse, inline=InlineThinking.of(quirks))

    def restore(self, state: bytes) -> Decoder:
        """See `Provider.restore`."""
        return msgspec.msgpack.decode(state, type=ResponsesDecoder)


provider: Provider = OpenAIResponses()
