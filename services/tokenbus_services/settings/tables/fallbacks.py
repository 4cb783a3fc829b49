"""Fallback providers."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from tokenbus_services.settings.types import Table


class FallbackChoice(Table, frozen=True, kw_only=True):
    """A provider and model to try."""

    provider: str
    """A name from `[providers.NAME]`."""
    model: str
    extra: dict[str, object] | None = None
    """The `extra` of its requests; a request's own `extra` goes only to the request's provider."""


class FallbackRoute(Table, frozen=True, kw_only=True):
    """Fallbacks to try if a turn fails before any of its visible text was emitted. The first route that matches a
    request applies. Criteria left out match every request.
    """

    fallback: Annotated[tuple[FallbackChoice, ...], Meta(min_length=1, max_length=8)]
    """In order of preference."""
    providers: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    """Exact names, or prefixes followed by `*` (`gpt-5*`)."""
    tenants: tuple[str, ...] = ()
    """Values of `metadata.tenant`."""
    metadata: dict[str, str] = {}
    """Text values that the request's metadata must contain."""
