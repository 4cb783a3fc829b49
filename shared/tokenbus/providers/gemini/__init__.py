"""Google's Gemini API: generateContent and streamGenerateContent."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from tokenbus.events.requests import Generate, Message, Mode
from tokenbus.providers.api import ApiName, Built, Decoder, Format, Provider, Quirks
from tokenbus.providers.building import formatted
from tokenbus.providers.files import FileApi
from tokenbus.providers.gemini.files import files
from tokenbus.providers.gemini.prefill import build_prefill
from tokenbus.providers.gemini.request import build
from tokenbus.providers.gemini.stream import GeminiDecoder
from tokenbus.providers.inline_thinking import InlineThinking
from tokenbus.providers.sse import MAX_IMAGE_EVENT_BYTES, SseDecoder


class Gemini:
    """The Gemini API as a `tokenbus.providers.api.Provider`."""

    name: ApiName = "gemini"
    key_header: tuple[str, str] = ("x-goog-api-key", "{}")
    default_base_url = "https://generativelanguage.googleapis.com/v1beta"
    default_key_env = "GEMINI_API_KEY"
    # Calls, images and what ends the response. What begins or ends a text cannot be told by a mark.
    urgent: tuple[bytes, ...] = (b'"functionCall"', b'"inlineData"', b'"finishReason"', b'"blockReason"', b'"error"')
    files: FileApi | None = files
    last: tuple[bytes, ...] = (b'data:{"error":{"',)
    image_keys: re.Pattern[bytes] | None = re.compile(
        rb'"mimeType"\s{0,32}:\s{0,32}"image/[a-z0-9.+-]{1,40}"\s{0,32},\s{0,32}"data"\s{0,32}:\s{0,32}"'
    )
    formats: Mapping[Mode, Format] = {"chat": build, "prefill": build_prefill}

    def build(self, request: Generate, history: list[Message], quirks: Quirks) -> Built:
        """See `Provider.build`."""
        return formatted(self.formats, request, history, quirks, makes_images=True)

    def decoder(self, *, status: int, headers: Mapping[str, str], stream: bool, quirks: Quirks) -> Decoder:
        """See `Provider.decoder`. A whole response is a stream of one chunk; without `alt=sse` one is an array."""
        sse = SseDecoder(limit=MAX_IMAGE_EVENT_BYTES)
        return GeminiDecoder.of(status, headers, sse=sse, inline=InlineThinking.of(quirks))

    def restore(self, state: bytes) -> Decoder:
        """See `Provider.restore`."""
        return msgspec.msgpack.decode(state, type=GeminiDecoder)


provider: Provider = Gemini()
