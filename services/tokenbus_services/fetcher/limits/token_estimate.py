"""What a call will take in tokens, roughly, before it is made; and what it took, as the provider says in the end."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import Opened
from tokenbus.events.normalized import Done, Failed, Normalized, UsageSeen
from tokenbus.events.requests import DocumentPart, Generate, ImagePart, Message
from tokenbus.events.usage import Usage
from tokenbus.providers import registry
from tokenbus.providers.api import Decoder

BYTES_PER_TOKEN = 4
"""Of English text, as the vendors of models put it; other languages have fewer. What is wrong with it is settled."""
IMAGE_TOKENS = 1_600
"""About what the vendors count for an image of full size."""
DOCUMENT_TOKENS = 5_000
UNBOUNDED_OUTPUT_TOKENS = 4_096
"""For a request that sets no ``max_tokens``."""


def estimate(request: Generate, history: Sequence[Message]) -> int:
    """The tokens to reserve for the request's next turn: its input, and the most that it may answer."""
    size = len(msgspec.json.encode((request.system, request.tools)))
    media = 0
    for message in (*request.messages, *history):
        if isinstance(message.content, str):
            size += len(message.content.encode())
            continue
        for part in message.content:
            match part:
                case ImagePart():
                    media += IMAGE_TOKENS
                case DocumentPart():
                    media += DOCUMENT_TOKENS
                case _:
                    size += len(msgspec.json.encode(part))
    return size // BYTES_PER_TOKEN + media + (request.max_tokens or UNBOUNDED_OUTPUT_TOKENS)


class TokenTally:
    """Listens to one call for what it took. Only where something is limited: else no fetcher decodes anything."""

    def __init__(self) -> None:
        self.error: ErrorInfo | None = None
        """The provider's own error."""
        self._decoder: Decoder | None = None
        self._usage: Usage | None = None
        self._done = False

    def open(self, answer: Opened) -> None:
        """The provider answered."""
        self._decoder = registry.get(answer.api).decoder(
            status=answer.status, headers=answer.headers, stream=answer.stream, quirks=answer.quirks
        )

    def feed(self, data: bytes) -> None:
        """What was just read of the answer."""
        if self._decoder:
            self._take(self._decoder.feed(data))

    def end(self) -> None:
        """The body ended."""
        if self._decoder:
            self._take(self._decoder.end())

    @property
    def settled(self) -> bool:
        """The provider said that it is done, and what it took: whatever breaks off after that changes nothing."""
        return self._done and self._usage is not None

    @property
    def used(self) -> int | None:
        """The tokens that the call took; None where nobody knows, for it was broken off: then what was reserved
        counts. A call that got no answer, or an error in its place, took none."""
        if self._done and self._usage:
            return _total(self._usage)
        if self._decoder is None or (self.error and self._usage is None):
            return 0
        return None

    def _take(self, events: Sequence[Normalized]) -> None:
        for event in events:
            match event:
                case UsageSeen():
                    self._usage = event.usage
                case Done():
                    self._usage = event.usage or self._usage
                    self._done = True
                case Failed():
                    self.error = event.error
                case _:
                    pass


def _total(usage: Usage) -> int:
    return usage.total if usage.total is not None else (usage.input or 0) + (usage.output or 0)
