"""Token counts in one meaning for all surfaces: providers disagree on what their input and output include. And what
tokens cost, and how many a request may have. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from tokenbus.events.requests import DocumentPart, Generate, ImagePart, Message
from tokenbus.events.usage import Usage
from tokenbus.providers import registry
from tokenbus.providers.api import ApiName
from tokenbus.providers.base import ProviderBase
from tokenbus_services.settings.tables.gateway import PriceSettings

BYTES_PER_TOKEN = 4
"""For English text, according to model vendors; other languages have fewer."""
IMAGE_TOKENS = 1_600
"""Roughly what vendors count for a full-size image."""
DOCUMENT_TOKENS = 5_000


def estimated_input(request: Generate, history: Sequence[Message] = ()) -> int:
    """Estimate the input tokens of the request's next turn. ``history``: messages of its earlier turns."""
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
    return size // BYTES_PER_TOKEN + media


class TokenCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a run. What the provider did not report is 0."""

    fresh: int
    """Input that was neither read from the provider's cache nor written to it."""
    cache_read: int
    cache_write: int
    output: int
    """Includes reasoning."""
    reasoning: int

    @property
    def input(self) -> int:
        """The whole input, cached or not."""
        return self.fresh + self.cache_read + self.cache_write

    @property
    def total(self) -> int:
        """Input and output."""
        return self.input + self.output


def token_counts(usage: Usage | None, api: ApiName) -> TokenCounts:
    """The counts of ``usage`` as this API means them (`ProviderBase.input_has_cached`, `output_has_reasoning`).

    ``api``: empty for a provider that the settings no longer have.
    """
    usage = usage or Usage()
    read, write, reasoning = usage.cache_read or 0, usage.cache_write or 0, usage.reasoning or 0
    given, written = usage.input or 0, usage.output or 0
    # A plug-in need not derive from ProviderBase.
    provider = registry.get(api) if api else ProviderBase
    input_has_cached: bool = getattr(provider, "input_has_cached", True)
    output_has_reasoning: bool = getattr(provider, "output_has_reasoning", True)
    return TokenCounts(
        fresh=max(0, given - read - write) if input_has_cached else given,
        cache_read=read,
        cache_write=write,
        output=written if output_has_reasoning else written + reasoning,
        reasoning=reasoning,
    )


_PER_MILLION_TO_NANO = 1000.0
"""A price per million tokens, in billionths of the currency per token."""


class PriceTable:
    """Prices by `PROVIDER/MODEL` prefix; the longest match wins, so a price holds for a model's dated versions too."""

    def __init__(self, prices: Mapping[str, PriceSettings]) -> None:
        self._prices = prices

    def name_for(self, names: Sequence[str]) -> str | None:
        """The name of the price of the first of these `PROVIDER/MODEL` names that has one."""
        for name in names:
            if found := [prefix for prefix in self._prices if name.startswith(prefix)]:
                return max(found, key=len)
        return None

    def max_output(self, name: str | None) -> int:
        """Tokens of an answer for which a request sets no bound, as budgets count it; 0 without a price."""
        return 0 if name is None else self._prices[name].max_output

    def nano_per_token(self, name: str | None) -> tuple[float, float, float, float]:
        """Fresh input, input read from the cache, input written to it, output; 0 without a price."""
        if name is None:
            return (0.0, 0.0, 0.0, 0.0)
        price = self._prices[name]
        read = price.input if price.cache_read is None else price.cache_read
        write = price.input if price.cache_write is None else price.cache_write
        per_million = (price.input, read, write, price.output)
        fresh, read, write, output = (one * _PER_MILLION_TO_NANO for one in per_million)
        return fresh, read, write, output
