"""Anthropic's Messages API and compatible services."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tokenbus.events.quirks import begins_with
from tokenbus.events.requests import Generate, Message, Mode
from tokenbus.providers.anthropic.request import API_VERSION, build, built, content_of, files, limits
from tokenbus.providers.anthropic.stream import AnthropicDecoder
from tokenbus.providers.api import ApiName, Built, Format, Provider, Quirks
from tokenbus.providers.base import ProviderBase
from tokenbus.providers.file_api import FileApi
from tokenbus.providers.media import COMMON_IMAGES, MIB, MediaLimits
from tokenbus.providers.request.participants import end_of_turn, provider_stops
from tokenbus.providers.request.transcript import opening_of, system_text, transcribe


def build_prefill(request: Generate, history: list[Message], quirks: Quirks) -> Built:
    """Build the HTTP call for the next turn. Raises RequestInvalid, naming the field.

    Thinking is written into the text, so the API's own thinking options are not set. Trailing whitespace is removed
    because the API rejects it.
    """
    token = end_of_turn(request, quirks)
    transcript = transcribe(request, history, token)
    messages: list[dict[str, object]] = [{"role": "user", "content": content_of(opening_of(request, transcript))}]
    messages.append({"role": "assistant", "content": transcript.text.rstrip()})
    body: dict[str, object] = {"model": request.model, "messages": messages, "stream": request.stream}
    if system := system_text(request):
        body["system"] = system
    stop = provider_stops(request, token, quirks.max_stop_strings, blanks=False)
    body |= limits(msgspec.structs.replace(request, thinking=None, stop=stop), quirks)
    return built(body, request, history, transcript.notes, quirks)


class Anthropic(ProviderBase):
    """The Messages API as a `tokenbus.providers.api.Provider`."""

    name: ApiName = "anthropic"
    decodes = AnthropicDecoder
    key_header: tuple[str, str] = ("x-api-key", "{}")
    default_base_url = "https://api.anthropic.com"
    default_key_env = "ANTHROPIC_API_KEY"
    models_path = "/v1/models"
    input_has_cached = False
    models_headers: Mapping[str, str] = {"anthropic-version": API_VERSION}
    # Start and stop of blocks and of the message, and the ping that often comes between a block's start and its first
    # chunk. A text that contains such a word is merely forwarded sooner.
    urgent: tuple[bytes, ...] = (b"content_block_st", b"message_st", b'"ping"', b'"error"')
    files: FileApi | None = files
    last: tuple[bytes, ...] = (b'data:{"type":"message_stop"', b'data:{"type":"error"')
    formats: Mapping[Mode, Format] = {"chat": build, "prefill": build_prefill}
    # https://platform.claude.com/docs/en/build-with-claude/vision, "Maximum size": four types, 10 MB of base64 per
    # image (5 MB on Bedrock and Google Cloud), 600 images (100 for models with a 200k context); …/pdf-support: 32 MB
    # per request.
    media = MediaLimits(
        image_types=COMMON_IMAGES,
        document_types=("application/pdf", "text/*"),
        image_bytes=10 * MIB * 3 // 4,
        images=600,
        request_bytes=32 * MIB,
    )

    options = frozenset({"parallel_tool_calls", "top_k", "user_id", "strict_tools"})

    def continues(self, request: Generate, quirks: Quirks) -> bool:
        """See `Provider.continues`. Impossible with signed thinking, a forced call or enforced JSON
        (https://docs.claude.com/en/docs/build-with-claude/prefill-claudes-response).
        """
        free = request.output_schema is None and request.tool_choice in (None, "auto", "none")
        thinks = request.thinking is not None and request.thinking.wanted
        return free and not thinks and begins_with(request.model, quirks.models_continuing)


provider: Provider = Anthropic()
