"""Token counts in one form for all providers."""

from __future__ import annotations

import msgspec


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens of one turn or one run. None: the provider did not report it.

    ``input`` is the provider's own input count, so it includes cached tokens only if the provider includes them.
    Nothing is derived; ``total`` is set only if the provider reports it.
    """

    input: int | None = None
    output: int | None = None
    reasoning: int | None = None
    cache_read: int | None = None
    cache_write: int | None = None
    total: int | None = None
    raw: dict[str, object] | None = None
    """The provider's own object, with the last non-null value of each field."""

    def plus(self, other: Usage) -> Usage:
        """The sum over turns. A count missing on both sides stays None, and ``raw`` is dropped."""

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
