"""Which limits apply to a call: the scopes of its provider, model and tenant, from the settings."""

from __future__ import annotations

from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts.limits import Kind, Scope
from tokenbus.events.model_names import model_key, names_model
from tokenbus_services.settings import LimitSettings, RateSettings

_NONE = RateSettings()


class Scopes:
    """The limits of a deployment."""

    def __init__(self, settings: LimitSettings, keys: Keys) -> None:
        self._settings = settings
        self._keys = keys
        self._tenants = {name.strip(): rates for name, rates in settings.tenants.items()}

    def of(self, provider: str, model: str, tenant: str) -> tuple[Scope, ...]:
        """Return the scopes of a call. Empty if nothing is limited, so that the server need not be asked.

        A provider with a settings table always has its model's scope too, because a provider's pause is stored there.
        """
        scopes: list[Scope] = []
        if (limits := self._settings.providers.get(provider)) is not None:
            name, rates = _of_model(limits.models, model)
            scopes.append(self._scope("model", f"{_quoted(provider).replace('/', '%2F')}/{_quoted(name)}", rates))
            if _limits(limits):
                scopes.append(self._scope("provider", _quoted(provider), limits))
        rates = self._tenants.get(tenant, self._settings.tenant)
        if rates is not None and _limits(rates):
            scopes.append(self._scope("tenant", _quoted(tenant), rates))
        return tuple(scopes)

    def _scope(self, kind: Kind, name: str, rates: RateSettings) -> Scope:
        return Scope(
            kind,
            self._keys.limit(f"{kind}:{name}"),
            rates.requests_per_second or 0.0,
            rates.tokens_per_minute or 0,
            rates.concurrency or 0,
        )


def _of_model(models: dict[str, RateSettings], model: str) -> tuple[str, RateSettings]:
    """The table entry for the model: its exact name first, then the longest matching prefix."""
    named = [name for name in models if names_model(name, model)]
    if not named:
        return model_key(model), _NONE
    name = max(named, key=lambda name: (not name.endswith("*"), len(name)))
    return name, models[name]


def _quoted(name: str) -> str:
    """Escape an arbitrary name for use in a key; keys of this project may end in `:held`."""
    return name.replace("%", "%25").replace(":", "%3A")


def _limits(rates: RateSettings) -> bool:
    return any((rates.requests_per_second, rates.tokens_per_minute, rates.concurrency))
