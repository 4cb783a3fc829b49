"""Provider APIs of other packages, found by their entry points.

A package adds one in its `pyproject.toml`; the name is what `api` in the settings says, the value is the object::

    [project.entry-points."tokenbus.providers"]
    acme = "acme_tokenbus:provider"

Nothing is imported before the settings name it.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points

from tokenbus.errors import SettingsError
from tokenbus.events.quirks import BUILT_IN
from tokenbus.providers.api import Provider

GROUP = "tokenbus.providers"


@cache
def names() -> tuple[str, ...]:
    """All provider APIs there are: those of tokenbus, then those of other packages."""
    others = {entry.name for entry in entry_points(group=GROUP)}
    return *BUILT_IN, *sorted(others.difference(BUILT_IN))


@cache
def load(api: str) -> Provider:
    """The provider API that a package adds under this name.

    Raises SettingsError if no package does, if two do, or if what the entry point names is no `Provider` of this name.
    """
    found = list(entry_points(group=GROUP, name=api))
    if not found:
        raise SettingsError("providers", "api", f"{api!r} is not known; there are {', '.join(names())}")
    if len(found) > 1:
        packages = " and ".join(sorted(_package(entry) for entry in found))
        raise SettingsError("providers", "api", f"{api!r} is added by {packages}; uninstall all but one")
    [entry] = found
    where = f"{api!r}, which {_package(entry)} adds as {entry.value},"
    try:
        provider = entry.load()
    except Exception as e:  # whatever its modules raise
        raise SettingsError("providers", "api", f"{where} cannot be loaded: {type(e).__name__}: {e}") from e
    missing = [name for name in sorted(_MEMBERS) if not hasattr(provider, name)]
    if missing:
        raise SettingsError("providers", "api", f"{where} is no provider API: it has no {', '.join(missing)}")
    if provider.name != api:
        raise SettingsError("providers", "api", f"{where} calls itself {provider.name!r}")
    return provider


_MEMBERS = {name for name in (*Provider.__annotations__, *vars(Provider)) if not name.startswith("_")}


def _package(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "a package"
