"""Provider APIs from other packages, discovered through entry points.

A package registers one in its `pyproject.toml`. The key is the value of `api` in the settings; the value is the
object::

    [project.entry-points."tokenbus.providers"]
    acme = "acme_tokenbus:provider"

A package is imported only if the settings name it.
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
    """All known provider APIs: the built-in ones, then those of other packages."""
    others = {entry.name for entry in entry_points(group=GROUP)}
    return *BUILT_IN, *sorted(others.difference(BUILT_IN))


@cache
def load(api: str) -> Provider:
    """Load the provider API that a package registers under this name.

    Raises SettingsError if no package does, if more than one does, or if the entry point is not a `Provider` of this
    name.
    """
    found = list(entry_points(group=GROUP, name=api))
    if not found:
        problem = f"unknown API {api!r}: it is not built in, and no installed package has it"
        raise SettingsError("providers", "api", f"{problem}; known: {', '.join(names())}")
    if len(found) > 1:
        packages = " and ".join(sorted(_package(entry) for entry in found))
        raise SettingsError("providers", "api", f"{api!r} is provided by {packages}; uninstall all but one")
    [entry] = found
    where = f"{api!r} from {_package(entry)} ({entry.value})"
    try:
        provider = entry.load()
    except Exception as e:  # plugin modules may raise anything on import
        raise SettingsError("providers", "api", f"{where} cannot be loaded: {type(e).__name__}: {e}") from e
    missing = [name for name in sorted(_MEMBERS) if not hasattr(provider, name)]
    if missing:
        raise SettingsError("providers", "api", f"{where} is not a provider API; missing: {', '.join(missing)}")
    if provider.name != api:
        raise SettingsError("providers", "api", f"{where} has the name {provider.name!r}")
    return provider


_MEMBERS = {name for name in (*Provider.__annotations__, *vars(Provider)) if not name.startswith("_")}


def _package(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "a package"
