"""Names that may be labels of metrics. Requests may bring any name, so only known ones are; the rest is `other`."""

from __future__ import annotations

from tokenbus.bus.activity import OTHER
from tokenbus_services.settings import Settings

MAX_MODELS = 100
"""Maximum models of one provider that become labels besides those in the settings."""


class KnownModels:
    """Knows the providers and models of the settings, and learns models that answered.

    A misspelt model never answers, so it never becomes a label.
    """

    def __init__(self, settings: Settings) -> None:
        self._known: dict[str, set[str]] = {name: set() for name in settings.providers}
        self._learned = dict.fromkeys(settings.providers, 0)
        for name, provider in settings.providers.items():
            self._known[name].update(provider.model_aliases.values())
        for name, rates in settings.limits.providers.items():
            self._known[name].update(model for model in rates.models if not model.endswith("*"))
        for route in settings.fallback_routes:
            for choice in route.fallback:
                self._known[choice.provider].add(choice.model)
        if gateway := settings.gateway:
            for full_name in (*gateway.models, *(one for choices in gateway.aliases.values() for one in choices)):
                provider, _, model = full_name.partition("/")
                self._known.get(provider, set[str]()).add(model)

    def label(self, provider: str, model: str, *, ok: bool) -> tuple[str, str]:
        """The labels for a provider and model. ``ok``: the model answered."""
        known = self._known.get(provider)
        if known is None:
            return OTHER, OTHER
        if model not in known:
            if not ok or self._learned[provider] >= MAX_MODELS:
                return provider, OTHER
            self._learned[provider] += 1
            known.add(model)
        return provider, model


def known_tenants(settings: Settings) -> frozenset[str]:
    """The tenants that the settings name. Empty: metrics do not distinguish tenants."""
    keys = settings.gateway.keys if settings.gateway else {}
    return frozenset({*settings.limits.tenants, *(key.tenant or name for name, key in keys.items())})
