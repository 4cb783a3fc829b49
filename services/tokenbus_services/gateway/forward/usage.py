"""Finds the token counts in an answer that passes by, whatever its form: JSON, or a stream of events. Pure."""

from __future__ import annotations

import re

import msgspec

from tokenbus.events.usage import Usage

HELD_BYTES = 16 * 2**10
"""Counts come at the end of an answer, or at its beginning. Only so much of each is held."""
_TRIED = 8
_KEYS = re.compile(rb'"(?:usage|usageMetadata)"\s*:\s*(?=\{)')
"""In a text of the answer the quotes would be escaped."""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Counts(msgspec.Struct):
    """The fields of all the APIs."""

    prompt_tokens: int | None = None
    input_tokens: int | None = None
    promptTokenCount: int | None = None  # noqa: N815
    completion_tokens: int | None = None
    output_tokens: int | None = None
    candidatesTokenCount: int | None = None  # noqa: N815
    total_tokens: int | None = None
    totalTokenCount: int | None = None  # noqa: N815
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None


class UsageScan:
    """Feed it every byte of an answer."""

    def __init__(self) -> None:
        self._head = b""
        self._tail = b""

    def feed(self, data: bytes) -> None:
        """Add what came."""
        if len(self._head) < HELD_BYTES:
            self._head += data[: HELD_BYTES - len(self._head)]
        self._tail = (self._tail + data)[-HELD_BYTES:] if len(data) < HELD_BYTES else data[-HELD_BYTES:]

    @property
    def found(self) -> Usage | None:
        """The last counts of the answer; None if it has none of tokens."""
        for held in (self._tail, self._head):
            for match in reversed(list(_KEYS.finditer(held))[-_TRIED:]):
                if (usage := _usage(_object(held, match.end()))) is not None:
                    return usage
        return None


def _object(data: bytes, begin: int) -> bytes:
    """The object that begins there; it has no strings with braces."""
    depth = 0
    for at in range(begin, len(data)):
        depth += {0x7B: 1, 0x7D: -1}.get(data[at], 0)
        if not depth:
            return data[begin : at + 1]
    return b""


def _usage(data: bytes) -> Usage | None:
    try:
        counts = msgspec.json.decode(data, type=_Counts)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    given = _first(counts.prompt_tokens, counts.input_tokens, counts.promptTokenCount)
    written = _first(counts.completion_tokens, counts.output_tokens, counts.candidatesTokenCount)
    total = _first(counts.total_tokens, counts.totalTokenCount)
    if given is None and total is not None:
        given = max(0, total - (written or 0))
    if given is None and written is None:
        return None
    details = counts.prompt_tokens_details or counts.input_tokens_details or _Details()
    numbers = (given or 0, written or 0, details.cached_tokens or 0)
    if min(numbers) < 0 or max(numbers) > 2**53:
        return None
    return Usage(input=numbers[0], output=numbers[1], cache_read=numbers[2] or None)


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)
