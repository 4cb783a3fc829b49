"""Token counts in one meaning for all surfaces: providers disagree on what their input and output include. Pure."""

from __future__ import annotations

import msgspec

from tokenbus.events.usage import Usage
from tokenbus.providers.api import ApiName


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
    """The counts of ``usage`` as this API means them.

    Anthropic reports cached input separately from the rest, and Gemini reasoning separately from the answer; the others
    include both.
    """
    usage = usage or Usage()
    read, write, reasoning = usage.cache_read or 0, usage.cache_write or 0, usage.reasoning or 0
    given, written = usage.input or 0, usage.output or 0
    if api == "anthropic":
        return TokenCounts(fresh=given, cache_read=read, cache_write=write, output=written, reasoning=reasoning)
    return TokenCounts(
        fresh=max(0, given - read - write),
        cache_read=read,
        cache_write=write,
        output=written + reasoning if api == "gemini" else written,
        reasoning=reasoning,
    )
