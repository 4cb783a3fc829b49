"""OpenAI's Images API and compatible services: one prompt in, images out."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from tokenbus.events.frames import ImagesRequested
from tokenbus.events.requests import Generate, Mode
from tokenbus.providers.api import ApiName, Decoder, Format, Provider, Quirks
from tokenbus.providers.base import ProviderBase
from tokenbus.providers.media import MIB, MediaLimits
from tokenbus.providers.openai_images.request import build
from tokenbus.providers.openai_images.stream import ImagesDecoder
from tokenbus.providers.request.images import images_asked, prompt_of
from tokenbus.providers.response.sse import MAX_IMAGE_EVENT_BYTES, SseDecoder


class OpenAIImages(ProviderBase):
    """The Images API as a `tokenbus.providers.api.Provider`."""

    name: ApiName = "openai-images"
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

    def decoder(self, *, status: int, headers: Mapping[str, str], stream: bool, quirks: Quirks) -> Decoder:
        """See `Provider.decoder`."""
        return ImagesDecoder.of(status, headers, sse=SseDecoder(limit=MAX_IMAGE_EVENT_BYTES))

    def restore(self, state: bytes) -> Decoder:
        """See `Provider.restore`."""
        return msgspec.msgpack.decode(state, type=ImagesDecoder)


provider: Provider = OpenAIImages()
