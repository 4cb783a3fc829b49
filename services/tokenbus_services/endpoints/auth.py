"""Credentials of a configured provider: a key from the environment or a file, or a custom `auth` object."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tokenbus.errors import SettingsError
from tokenbus.providers.api import Provider
from tokenbus.providers.auth import Auth
from tokenbus_services.settings import ProviderSettings
from tokenbus_services.settings.file import add_settings_directory_to_path

_MEMBERS = ("needs_body", "secrets", "headers", "rejected")


class KeyMissing(Exception):
    """Neither the environment nor a file holds the provider's key."""

    def __init__(self, name: str, where: str, problem: str = "") -> None:
        super().__init__(f"provider {name}: {where} {problem or 'holds no key'}")
        self.variable = where


class KeyUnusable(Exception):
    """The key has characters that are invalid in a header. Checked here because an HTTP library would quote it in
    its error.
    """

    def __init__(self, name: str, where: str) -> None:
        super().__init__(f"provider {name}: the key in {where} has characters that a header cannot hold")
        self.variable = where


class Key:
    """A key sent in a header. A key file is read again when it changes."""

    def __init__(self, name: str, settings: ProviderSettings, api: Provider, env: Mapping[str, str]) -> None:
        """Does not read the key file yet."""
        self._name = name
        variable = api.default_key_env if settings.api_key_env is None else settings.api_key_env
        path = settings.api_key_file or (env.get(f"{variable}_FILE") if variable else None)
        self._value = env.get(variable, "").strip() if variable and not settings.api_key_file else ""
        self._path = Path(path) if path and not self._value else None
        self._where = str(self._path) if self._path else f"the environment variable {variable}"
        self._place = str(self._path) if self._path else variable
        self._needed = bool(variable or settings.api_key_file)
        self._read: tuple[int, int, int] | None = None
        """Inode, time and size of the file when it was last read."""
        header, form = api.key_header
        if settings.key_header is not None:
            header, form = settings.key_header, "{}"
        self._header = header
        self._form = settings.key_format or form

    @property
    def secrets(self) -> Collection[str]:
        """The key that was sent last."""
        return [self._value]

    @property
    def digestible(self) -> str:
        """Input for a digest that distinguishes accounts."""
        self._look()
        return self._form.replace("{}", self._value)

    def headers(self) -> dict[str, str]:
        """Return the header with the key; empty if the provider needs none. Raises KeyMissing, KeyUnusable."""
        problem = self._look()
        if self._needed and not self._value:
            raise KeyMissing(self._name, self._where, problem)
        if not (self._value.isascii() and self._value.isprintable()):
            raise KeyUnusable(self._name, self._place)
        return {self._header: self._form.replace("{}", self._value)} if self._value else {}

    def rejected(self) -> bool:
        """Whether the key has changed since the provider rejected it."""
        before = self._value
        self._look()
        return self._value != before

    def _look(self) -> str:
        """Read the file if it changed. Returns the problem, or empty text if there is none."""
        if self._path is None:
            return ""
        try:
            found = self._path.stat()
            if self._read != (seen := (found.st_ino, found.st_mtime_ns, found.st_size)):
                self._value, self._read = self._path.read_text(encoding="utf-8").strip(), seen
        except (OSError, UnicodeDecodeError) as e:
            self._value, self._read = "", None
            return f"cannot be read: {getattr(e, 'strerror', None) or 'no text'}"
        return ""


def auth_of(name: str, settings: ProviderSettings, env: Mapping[str, str]) -> Auth | None:
    """Create the provider's custom `auth` object; None if it has none. Raises SettingsError."""
    if settings.auth is None:
        return None
    add_settings_directory_to_path(env)
    module, _, attribute = settings.auth.partition(":")
    where = f"{name}.auth"
    try:
        made: Any = getattr(importlib.import_module(module), attribute)(**settings.auth_options)
    except Exception as e:  # user code may raise anything
        raise SettingsError("providers", where, f"{settings.auth}: {type(e).__name__}: {e}") from e
    if missing := [member for member in _MEMBERS if not hasattr(made, member)]:
        raise SettingsError("providers", where, f"{settings.auth} gave a {type(made).__name__} without {missing}")
    return made
