"""What a run cost by the prices of the settings. Pure; the exact spend of a key is the gateway's count."""

from __future__ import annotations

from tokenbus.bus.scripts.gateway import NANO
from tokenbus.events.usage import Usage
from tokenbus_services.pricing.prices import PriceTable
from tokenbus_services.pricing.token_counts import token_counts
from tokenbus_services.settings import Settings


class Costs:
    """The deployment's prices."""

    def __init__(self, settings: Settings) -> None:
        self._prices = PriceTable(settings.gateway.prices if settings.gateway else {})
        self._apis = {name: provider.api for name, provider in settings.providers.items()}

    def cost(self, usage: Usage | None, provider: str | None, models: list[str | None]) -> float | None:
        """The cost of this usage at the first of the models' names that has a price; None if none has one."""
        if usage is None or provider is None:
            return None
        name = self._prices.name_for([f"{provider}/{model}" for model in models if model])
        if name is None:
            return None
        counts = token_counts(usage, self._apis.get(provider, ""))
        prices = self._prices.nano_per_token(name)
        used = (counts.fresh, counts.cache_read, counts.cache_write, counts.output)
        return sum(n * price for n, price in zip(used, prices, strict=True)) / NANO
