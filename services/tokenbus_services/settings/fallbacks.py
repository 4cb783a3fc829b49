"""Who is asked when a provider fails."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from tokenbus_services.settings.types import Table


class FallbackChoice(Table, frozen=True, kw_only=True):
    """A provider and a model to ask."""

    provider: str
    """A name of `[providers.NAME]`."""
    model: str
    extra: dict[str, object] | None = None
    """What its requests hold in `extra`; a request's own goes to the request's provider alone."""


class FallbackRoute(Table, frozen=True, kw_only=True):
    """Whom runs ask when a turn fails before anything visible of it was emitted. The first route that a request is on
    counts. What is left out of a route, any request has."""

    fallback: Annotated[tuple[FallbackChoice, ...], Meta(min_length=1, max_length=8)]
    """One after the other."""
    providers: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    """These, or those with a beginning and `*` after it (`gpt-5*`)."""
    tenants: tuple[str, ...] = ()
    """Of `metadata.tenant`."""
    metadata: dict[str, str] = {}
    """Texts that the request's metadata must have."""
