"""What tokens cost, by provider and model. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenbus_services.settings.tables.gateway_keys import PriceSettings

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
