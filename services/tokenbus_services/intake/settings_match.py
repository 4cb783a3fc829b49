"""Decides which requests a settings table applies to. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from tokenbus.core.request.bounds import tenant_of
from tokenbus.events.model_names import names_model
from tokenbus.events.requests import Generate


class Described(Protocol):
    """The conditions of a settings table; an empty field matches any request."""

    @property
    def providers(self) -> tuple[str, ...]: ...
    @property
    def models(self) -> tuple[str, ...]: ...
    @property
    def metadata(self) -> Mapping[str, str]: ...


class Route(Described, Protocol):
    """The same conditions, and the tenant."""

    @property
    def tenants(self) -> tuple[str, ...]: ...


def meets(request: Generate, described: Described) -> bool:
    """Whether the request matches by provider, model and metadata."""
    metadata = request.metadata or {}
    return (
        (not described.providers or request.provider in described.providers)
        and (not described.models or any(names_model(name, request.model) for name in described.models))
        and all(metadata.get(name) == text for name, text in described.metadata.items())
    )


def on_route(request: Generate, route: Route) -> bool:
    """Whether the request matches, including its tenant."""
    return meets(request, route) and (not route.tenants or tenant_of(request.metadata) in route.tenants)
