"""OpenAI's Responses API and compatible services."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tokenbus.events.requests import Mode
from tokenbus.providers.api import ApiName, Format, JobApi, Provider, SteerApi
from tokenbus.providers.base import ProviderBase
from tokenbus.providers.file_api import FileApi
from tokenbus.providers.media import ANY, COMMON_IMAGES, MIB, MediaLimits
from tokenbus.providers.openai_responses.files import files
from tokenbus.providers.openai_responses.request import build, jobs
from tokenbus.providers.openai_responses.steering import steering
from tokenbus.providers.openai_responses.stream import ResponsesDecoder
from tokenbus.providers.response.sse import MAX_IMAGE_EVENT_BYTES


class OpenAIResponses(ProviderBase):
    """The Responses API as a `tokenbus.providers.api.Provider`."""

    name: ApiName = "openai-responses"
    decodes = ResponsesDecoder
    event_bytes = MAX_IMAGE_EVENT_BYTES
    default_base_url = "https://api.openai.com/v1"
    default_key_env = "OPENAI_API_KEY"
    # Start and end of items, parts and the response. A text that contains such a word is merely forwarded sooner.
    urgent: tuple[bytes, ...] = (
        b"output_item.",
        b"content_part.",
        b"response.c",  # created, completed, cancelled
        b"response.incomplete",
        b"response.failed",
        b'"error"',
    )
    files: FileApi | None = files
    jobs: JobApi | None = jobs
    steering: SteerApi | None = steering
    last: tuple[bytes, ...] = tuple(
        b'data:{"type":"%b"' % name
        for name in (b"response.completed", b"response.incomplete", b"response.failed", b"response.cancelled", b"error")
    )
    image_keys: re.Pattern[bytes] | None = re.compile(rb'"(?:result|partial_image_b64)"\s{0,32}:\s{0,32}"')
    formats: Mapping[Mode, Format] = {"chat": build}
    # Same guides as Chat Completions; this API also accepts text files, spreadsheets and slides.
    media = MediaLimits(
        image_types=COMMON_IMAGES, document_types=ANY, document_bytes=50 * MIB, images=1500, request_bytes=512 * MIB
    )
    makes_images = True
    options = frozenset({"json_object", "parallel_tool_calls", "user_id", "strict_tools", "free_text_tools"})


provider: Provider = OpenAIResponses()
