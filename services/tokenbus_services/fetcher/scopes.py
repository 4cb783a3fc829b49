"""Which limits hold for a call: the scopes of its provider, its model and its tenant, from the settings."""

from __future__ import annotations

from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts.limits import Kind, Scope
from tokenbus_services.settings import LimitSettings, RateSettings

_NONE = RateSettings()


class Scopes:
    """The limits of a deployment."""

    def __init__(self, settings: LimitSettings, keys: Keys) -> None:
        self._settings = settings
        self._keys = keys

    def of(self, provider: str, model: str, tenant: str) -> tuple[Scope, ...]:
        """What a call takes part in. Empty where nothing is limited, so that the server need not be asked.

        A provider with a table always has the scope of the model too: a pause that it asked for lies there.
        """
        scopes: list[Scope] = []
        if (limits := self._settings.providers.get(provider)) is not None:
            name, rates = _of_model(limits.models, model)
            scopes.append(self._scope("model", f"{provider}/{name}", rates))
            if _limits(limits):
                scopes.append(self._scope("provider", provider, limits))
        rates = self._settings.tenants.get(tenant, self._settings.tenant)
        if rates is not None and _limits(rates):
            scopes.append(self._scope("tenant", tenant, rates))
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
    if model in models:
        return model, models[model]
    beginnings = [name for name in models if name.endswith("*") and model.startswith(name[:-1])]
    if beginnings:
        name = max(beginnings, key=len)
        return name, models[name]
    return model, _NONE


def _limits(rates: RateSettings) -> bool:
    return any((rates.requests_per_second, rates.tokens_per_minute, rates.concurrency))
