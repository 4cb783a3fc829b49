"""The deployment's blob loader: the blob service's client, or the one named by the settings."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any

from tokenbus.blobs import BlobLoader
from tokenbus.errors import SettingsError
from tokenbus_services.blobs.client import HttpBlobs
from tokenbus_services.settings import BlobSettings
from tokenbus_services.settings.user_modules import add_settings_directory_to_path

_METHODS = ("store", "load", "aclose")


def loader_of(settings: BlobSettings, env: Mapping[str, str] = os.environ) -> BlobLoader:
    """Create the loader; the caller must close it. Its module may be in the directory of the settings file.

    Raises SettingsError if `blobs.loader` is invalid.
    """
    if settings.loader is None:
        return HttpBlobs.from_settings(settings, env)
    add_settings_directory_to_path(env)
    factory = _factory(settings.loader)
    try:
        made = factory()
    except Exception as e:
        raise _refused(f"{settings.loader!r} raised {type(e).__name__}: {e}") from e
    if missing := [name for name in _METHODS if not callable(getattr(made, name, None))]:
        raise _refused(f"{settings.loader!r} returned a {type(made).__name__} without {', '.join(missing)}")
    return made


def check_loader(path: str, env: Mapping[str, str] = os.environ) -> None:
    """Import the factory at this path, and do not call it. Raises SettingsError if that is not possible."""
    add_settings_directory_to_path(env)
    _factory(path)


def _factory(path: str) -> Callable[[], Any]:
    module, _, name = path.partition(":")
    try:
        found: object = getattr(importlib.import_module(module), name)
    except Exception as e:
        raise _refused(f"{path!r} cannot be imported: {type(e).__name__}: {e}") from e
    if not callable(found):
        raise _refused(f"{path!r} is not callable: it is of type {type(found).__name__}")
    return found


def _refused(problem: str) -> SettingsError:
    return SettingsError("settings", "blobs.loader", problem)
