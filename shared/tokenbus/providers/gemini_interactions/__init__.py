"""Google's Interactions API."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from tokenbus.events.frames import ImagesRequested
from tokenbus.events.requests import Generate, Mode
from tokenbus.providers import gemini
from tokenbus.providers.api import ApiName, Format, JobApi, Provider
from tokenbus.providers.base import ProviderBase
from tokenbus.providers.file_api import FileApi
from tokenbus.providers.gemini_interactions.request import build, jobs
from tokenbus.providers.gemini_interactions.stream import API, InteractionsDecoder
from tokenbus.providers.media import COMMON_IMAGES
from tokenbus.providers.request.images import images_asked
from tokenbus.providers.response.sse import MAX_IMAGE_EVENT_BYTES


class GeminiInteractions(ProviderBase):
    """The Interactions API as a `tokenbus.providers.api.Provider`. Keys, addresses, files and limits are Gemini's."""

    name: ApiName = API
    decodes = InteractionsDecoder
    event_bytes = MAX_IMAGE_EVENT_BYTES
    key_header: tuple[str, str] = gemini.provider.key_header
    default_base_url = gemini.provider.default_base_url
    default_key_env = gemini.provider.default_key_env
    # Start and end of steps and of the interaction. A text that contains such a word is merely forwarded sooner.
    urgent: tuple[bytes, ...] = (b'"step.st', b'"interaction.c', b'"error"')
    files: FileApi | None = gemini.provider.files
    jobs: JobApi | None = jobs
    last: tuple[bytes, ...] = (b"data:[DONE]", b'data:{"error":{"')
    image_keys: re.Pattern[bytes] | None = re.compile(
        rb'"mime_type"\s{0,32}:\s{0,32}"image/[a-z0-9.+-]{1,40}"\s{0,32},\s{0,32}"data"\s{0,32}:\s{0,32}"'
    )
    formats: Mapping[Mode, Format] = {"chat": build}
    # The types of images in Google's SDK; the rest as for generateContent.
    media = msgspec.structs.replace(
        gemini.provider.media,
        image_types=(*COMMON_IMAGES, "image/heic", "image/heif", "image/bmp", "image/tiff"),
    )
    makes_images = True
    output_has_reasoning = False
    options = frozenset({"json_object", "seed"})

    def images_asked(self, request: Generate) -> ImagesRequested:
        return images_asked(request, own_model=True)


provider: Provider = GeminiInteractions()
