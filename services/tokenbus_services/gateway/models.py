"""Model names as clients give them: `PROVIDER/MODEL`, or an alias of the settings. Pure.

Some SDKs take what is before a slash for a name of their own and remove it, so `PROVIDER:MODEL` is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from tokenbus.providers.api import ApiName
from tokenbus_services.gateway.problem import Problem, Refusal
from tokenbus_services.settings.tables.gateway import GatewaySettings


class RoutedModel(msgspec.Struct, frozen=True):
    """A configured provider, and a model of it."""

    provider: str
    model: str


def aliases_of(table: GatewaySettings) -> dict[str, list[RoutedModel]]:
    """The providers and models of each alias, in order of preference."""
    return {
        name: [RoutedModel(*choice.partition("/")[::2]) for choice in choices]
        for name, choices in table.aliases.items()
    }


class ResolvedModel(msgspec.Struct, frozen=True, kw_only=True):
    """Which provider and model a request goes to."""

    name: str
    """As the client gave it; answers repeat it."""
    provider: str
    model: str
    api: ApiName
    """API of the provider: decides which parameters it takes."""
    fallback: tuple[RoutedModel, ...] = ()
    """Tried in turn until something visible is emitted."""
    apis: Mapping[str, ApiName] = {}
    """APIs of all these providers, by name; empty without a fallback."""


class ModelTable:
    """Resolves model names of clients.

    ``providers``: the API of each configured provider. ``aliases``: for each alias its providers and models in order of
    preference. ``listed``: the names that ``/v1/models`` lists in addition to the aliases.
    """

    def __init__(
        self,
        providers: Mapping[str, ApiName],
        aliases: Mapping[str, Sequence[RoutedModel]],
        listed: Sequence[str] = (),
    ) -> None:
        self._providers = providers
        self._aliases = aliases
        self._listed = listed

    def names(self) -> list[str]:
        """All listed names, aliases first."""
        return [*self._aliases, *(name for name in self._listed if name not in self._aliases)]

    def resolve(self, name: str) -> ResolvedModel:
        """Return provider and model for a client's name. Raises Refusal (404, `model_not_found`)."""
        if choices := self._aliases.get(name):
            first, *rest = choices
            return ResolvedModel(
                name=name,
                provider=first.provider,
                model=first.model,
                api=self._providers[first.provider],
                fallback=tuple(rest),
                apis={each.provider: self._providers[each.provider] for each in choices} if rest else {},
            )
        for mark in "/:":
            provider, found, model = name.partition(mark)
            if found and model and provider in self._providers:
                return ResolvedModel(name=name, provider=provider, model=model, api=self._providers[provider])
        raise Refusal(
            Problem(
                status=404,
                code="model_not_found",
                message=f"the model {name[:200]!r} is neither PROVIDER/MODEL of a configured provider nor an alias",
                kind="not_found",
                param="model",
            )
        )
