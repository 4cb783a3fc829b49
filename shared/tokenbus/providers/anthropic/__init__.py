"""Anthropic's Messages API, and those who speak it."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from tokenbus.events.requests import Generate, Message, Mode
from tokenbus.providers.anthropic.files import files
from tokenbus.providers.anthropic.prefill import build_prefill
from tokenbus.providers.anthropic.request import build
from tokenbus.providers.anthropic.stream import AnthropicDecoder
from tokenbus.providers.api import ApiName, Built, Decoder, Format, Provider, Quirks
from tokenbus.providers.building import formatted
from tokenbus.providers.files import FileApi
from tokenbus.providers.inline_thinking import InlineThinking


class Anthropic:
    """The Messages API as a `tokenbus.providers.api.Provider`."""

    name: ApiName = "anthropic"
    key_header: tuple[str, str] = ("x-api-key", "{}")
    default_base_url = "https://api.anthropic.com"
    default_key_env = "ANTHROPIC_API_KEY"
    # Starts and stops of blocks and of the message, and the ping that often comes between a block's start and its first
    # chunk; a text with such a word in it is merely forwarded sooner.
    urgent: tuple[bytes, ...] = (b"content_block_st", b"message_st", b'"ping"', b'"error"')
    files: FileApi | None = files
    last: tuple[bytes, ...] = (b'data:{"type":"message_stop"', b'data:{"type":"error"')
    image_keys: re.Pattern[bytes] | None = None
    formats: Mapping[Mode, Format] = {"chat": build, "prefill": build_prefill}

    def build(self, request: Generate, history: list[Message], quirks: Quirks) -> Built:
        """See `Provider.build`."""
        return formatted(self.formats, request, history, quirks)

    def decoder(self, *, status: int, headers: Mapping[str, str], stream: bool, quirks: Quirks) -> Decoder:
        """See `Provider.decoder`. A whole message says by its `type` that it is one, whatever was asked for."""
        return AnthropicDecoder.of(status, headers, inline=InlineThinking.of(quirks))

    def restore(self, state: bytes) -> Decoder:
        """See `Provider.restore`."""
        return msgspec.msgpack.decode(state, type=AnthropicDecoder)


provider: Provider = Anthropic()
