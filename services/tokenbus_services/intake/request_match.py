"""Which requests a table of the settings speaks of: pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from tokenbus.core.request.tenant import tenant_of
from tokenbus.events.model_names import names_model
from tokenbus.events.requests import Generate


class Described(Protocol):
    """Requests as a table describes them: what is left empty, any request meets."""

    @property
    def providers(self) -> tuple[str, ...]: ...
    @property
    def models(self) -> tuple[str, ...]: ...
    @property
    def metadata(self) -> Mapping[str, str]: ...


class Route(Described, Protocol):
    """The same, by tenant too."""

    @property
    def tenants(self) -> tuple[str, ...]: ...


def meets(request: Generate, described: Described) -> bool:
    """Whether it is one of these: its provider, its model and each text of the metadata."""
    metadata = request.metadata or {}
    return (
        (not described.providers or request.provider in described.providers)
        and (not described.models or any(names_model(name, request.model) for name in described.models))
        and all(metadata.get(name) == text for name, text in described.metadata.items())
    )


def on_route(request: Generate, route: Route) -> bool:
    """The same, and its tenant."""
    return meets(request, route) and (not route.tenants or tenant_of(request.metadata) in route.tenants)
