"""Token counts in one meaning for all surfaces: providers disagree on what their input and output include. Pure."""

from __future__ import annotations

import msgspec

from tokenbus.events.usage import Usage
from tokenbus.providers import registry
from tokenbus.providers.api import ApiName
from tokenbus.providers.base import ProviderBase


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
