"""OpenAI's Chat Completions API, and those who speak it; how a vendor differs is data (`Quirks`)."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from tokenbus.events.requests import Generate, Message, Mode
from tokenbus.providers.api import ApiName, Built, Decoder, Format, Provider, Quirks
from tokenbus.providers.building import formatted
from tokenbus.providers.files import FileApi
from tokenbus.providers.inline_thinking import InlineThinking
from tokenbus.providers.openai_chat.prefill import build_prefill
from tokenbus.providers.openai_chat.request import build
from tokenbus.providers.openai_chat.stream import ChatDecoder
from tokenbus.providers.openai_responses.files import chat_files


class OpenAIChat:
    """Chat Completions as a `tokenbus.providers.api.Provider`."""

    name: ApiName = "openai-chat"
    key_header: tuple[str, str] = ("authorization", "Bearer {}")
    default_base_url = "https://api.openai.com/v1"
    default_key_env = "OPENAI_API_KEY"
    # The end of text, the start of a tool call, the end of the response. What begins a text cannot be told by a mark.
    urgent: tuple[bytes, ...] = (
        b'"finish_reason":"',
        b'"finish_reason": "',
        b'"type":"function"',
        b"[DONE]",
        b'"error"',
    )
    files: FileApi | None = chat_files
    last: tuple[bytes, ...] = (b"data:[DONE]", b'data:{"error":{"')
    image_keys: re.Pattern[bytes] | None = re.compile(rb'"url"\s{0,32}:\s{0,32}"data:image/[a-z0-9.+-]{1,40};base64,')
    formats: Mapping[Mode, Format] = {"chat": build, "prefill": build_prefill}

    def build(self, request: Generate, history: list[Message], quirks: Quirks) -> Built:
        """See `Provider.build`."""
        return formatted(self.formats, request, history, quirks)

    def decoder(self, *, status: int, headers: Mapping[str, str], stream: bool, quirks: Quirks) -> Decoder:
        """See `Provider.decoder`. A whole response has a `message` where a chunk has a `delta`."""
        return ChatDecoder.of(
            status, headers, inline=InlineThinking.of(quirks), reasoning_fields=quirks.reasoning_fields
        )

    def restore(self, state: bytes) -> Decoder:
        """See `Provider.restore`."""
        return msgspec.msgpack.decode(state, type=ChatDecoder)


provider: Provider = OpenAIChat()
