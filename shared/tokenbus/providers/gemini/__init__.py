"""Google's Gemini API: generateContent and streamGenerateContent."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from tokenbus.events.frames import ImagesRequested
from tokenbus.events.quirks import begins_with
from tokenbus.events.requests import Generate, Mode
from tokenbus.providers.api import ApiName, Decoder, Format, Provider, Quirks
from tokenbus.providers.base import ProviderBase
from tokenbus.providers.file_api import FileApi
from tokenbus.providers.gemini.files import files
from tokenbus.providers.gemini.prefill import END_OF_TURN, build_prefill
from tokenbus.providers.gemini.request import build
from tokenbus.providers.gemini.stream import GeminiDecoder
from tokenbus.providers.media import ANY, MIB, MediaLimits
from tokenbus.providers.request.images import images_asked
from tokenbus.providers.response.inline_thinking import InlineThinking
from tokenbus.providers.response.sse import MAX_IMAGE_EVENT_BYTES, SseDecoder


class Gemini(ProviderBase):
    """The Gemini API as a `tokenbus.providers.api.Provider`."""

    name: ApiName = "gemini"
    key_header: tuple[str, str] = ("x-goog-api-key", "{}")
    default_base_url = "https://generativelanguage.googleapis.com/v1beta"
    default_key_env = "GEMINI_API_KEY"
    # Calls, images and the end of the response. No byte pattern marks the start or end of a text.
    urgent: tuple[bytes, ...] = (b'"functionCall"', b'"inlineData"', b'"finishReason"', b'"blockReason"', b'"error"')
    files: FileApi | None = files
    last: tuple[bytes, ...] = (b'data:{"error":{"',)
    image_keys: re.Pattern[bytes] | None = re.compile(
        rb'"mimeType"\s{0,32}:\s{0,32}"image/[a-z0-9.+-]{1,40}"\s{0,32},\s{0,32}"data"\s{0,32}:\s{0,32}"'
    )
    formats: Mapping[Mode, Format] = {"chat": build, "prefill": build_prefill}
    # https://ai.google.dev/gemini-api/docs/file-input-methods, "Input method comparison": 100 MB per request (20 MB
    # until January 2026), 50 MB per PDF, 2 GB through the File API; …/image-understanding: five types, 3,600 images.
    # Audio and video count as documents here: the API accepts many types of them.
    media = MediaLimits(
        image_types=("image/png", "image/jpeg", "image/webp", "image/heic", "image/heif"),
        document_types=ANY,
        document_bytes=2 * 10**9,
        pdf_bytes=50 * MIB,
        images=3600,
        request_bytes=100 * MIB,
    )
    makes_images = True
    output_has_reasoning = False
    end_of_turn = END_OF_TURN
    takes_path = False
    options = frozenset({"json_object", "seed", "top_k", "frequency_penalty", "presence_penalty"})

    def continues(self, request: Generate, quirks: Quirks) -> bool:
        """See `Provider.continues`."""
        return begins_with(request.model, quirks.models_continuing)

    def images_asked(self, request: Generate) -> ImagesRequested:
        """See `Provider.images_asked`."""
        return images_asked(request, own_model=True)

    def decoder(self, *, status: int, headers: Mapping[str, str], stream: bool, quirks: Quirks) -> Decoder:
        """See `Provider.decoder`. A whole response decodes as a one-chunk stream; without `alt=sse`, a stream is a JSON
        array.
        """
        sse = SseDecoder(limit=MAX_IMAGE_EVENT_BYTES)
        return GeminiDecoder.of(status, headers, sse=sse, inline=InlineThinking.of(quirks))

    def restore(self, state: bytes) -> Decoder:
        """See `Provider.restore`."""
        return msgspec.msgpack.decode(state, type=GeminiDecoder)


provider: Provider = Gemini()
