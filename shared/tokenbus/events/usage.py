"""Token counts in one shape for all providers."""

from __future__ import annotations

import msgspec


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens of one turn or one run. None means that the provider did not say.

    ``input`` counts what the provider calls its input as it stands, caches included only where the
    provider includes them; nothing is derived but ``total`` where the provider gives it itself.
    """

    input: int | None = None
    output: int | None = None
    reasoning: int | None = None
    cache_read: int | None = None
    cache_write: int | None = None
    total: int | None = None
    raw: dict[str, object] | None = None
    """The provider's own object, last non-null value of each field."""

    def plus(self, other: Usage) -> Usage:
        """The sum over turns; a count that neither side has stays None, and ``raw`` is dropped."""

        def add(a: int | None, b: int | None) -> int | None:
            return b if a is None else a if b is None else a + b

        return Usage(
            input=add(self.input, other.input),
            output=add(self.output, other.output),
            reasoning=add(self.reasoning, other.reasoning),
            cache_read=add(self.cache_read, other.cache_read),
            cache_write=add(self.cache_write, other.cache_write),
            total=add(self.total, other.total),
        )
