"""Estimates a call's tokens before it is made, and reads the actual number from the provider's answer."""

from __future__ import annotations

from collections.abc import Sequence

from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import Opened
from tokenbus.events.normalized import Done, Failed, Normalized, UsageSeen
from tokenbus.events.requests import Generate, Message
from tokenbus.events.usage import Usage
from tokenbus.providers import registry
from tokenbus.providers.api import Decoder
from tokenbus_services.pricing import estimated_input

UNBOUNDED_OUTPUT_TOKENS = 4_096
"""For requests without ``max_tokens``."""


def estimate(request: Generate, history: Sequence[Message]) -> int:
    """Estimate the tokens of the request's next turn: its input plus its maximum output. The refund corrects it."""
    return estimated_input(request, history) + (request.max_tokens or UNBOUNDED_OUTPUT_TOKENS)


class TokenTally:
    """Reads a call's token usage from its answer. Used only if a limit applies; otherwise no fetcher decodes
    answers.
    """

    def __init__(self) -> None:
        self.error: ErrorInfo | None = None
        """The provider's own error."""
        self._decoder: Decoder | None = None
        self._usage: Usage | None = None
        self._done = False

    def open(self, answer: Opened) -> None:
        """Start reading an answer."""
        self._decoder = registry.get(answer.api).decoder(
            status=answer.status, headers=answer.headers, stream=answer.stream, quirks=answer.quirks
        )

    def feed(self, data: bytes) -> None:
        """Add data read from the body."""
        if self._decoder:
            self._take(self._decoder.feed(data))

    def end(self) -> None:
        """Handle the end of the body."""
        if self._decoder:
            self._take(self._decoder.end())

    @property
    def final_count(self) -> bool:
        """Whether the provider reported the end and its usage; a connection lost after that changes nothing."""
        return self._done and self._usage is not None

    @property
    def used(self) -> int | None:
        """Tokens used; None if unknown because the call broke off: the estimate counts then. A call without an
        answer, or with an error instead of one, used none.
        """
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
