"""Which requests a table of the settings speaks of: pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from tokenbus.events.requests import Generate


class Described(Protocol):
    """Requests as a table describes them: what is left empty, any request meets."""

    @property
    def providers(self) -> tuple[str, ...]: ...
    @property
    def models(self) -> tuple[str, ...]: ...
    @property
    def metadata(self) -> Mapping[str, str]: ...


def meets(request: Generate, described: Described) -> bool:
    """Whether it is one of these: its provider, its model and each text of the metadata."""
    metadata = request.metadata or {}
    return (
        (not described.providers or request.provider in described.providers)
        and (not described.models or any(_is_model(request.model, name) for name in described.models))
        and all(metadata.get(name) == text for name, text in described.metadata.items())
    )


def _is_model(model: str, name: str) -> bool:
    return model.startswith(name[:-1]) if name.endswith("*") else model == name
