"""A secret in an environment variable, or in the file that the variable with `_FILE` appended to its name names.

A file is read again when it changes, so that a secret can be replaced while processes run: Docker's and Kubernetes'
secrets, Vault's agent and the like write such files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tokenbus.errors import SettingsError

FILE = "_FILE"
"""Appended to a variable's name."""
POLL_S = 1.0
"""Minimum time between two looks at a file. What is sent after a look uses the new secret."""
GRACE_S = 60.0
"""How long a service still accepts the secret before, from those that have not seen the change yet."""


class Secret:
    """One secret. Without the variable and without a file it is empty."""

    def __init__(
        self,
        name: str,
        env: Mapping[str, str],
        *,
        check: Callable[[str], str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the secret. ``check``: returns the problem of a value, without quoting it; empty if the value is valid.

        Raises SettingsError if the variable and the file's are both set, the file cannot be read or is empty, or
        ``check`` finds something.
        """
        value, path = env.get(name, "").strip(), env.get(f"{name}{FILE}", "")
        if value and path:
            raise SettingsError("environment", f"{name}{FILE}", f"{name} is set too: unset one of them")
        self.name = f"{name}{FILE}" if path else name
        """The variable that holds it, or the path of its file."""
        self._path = Path(path) if path else None
        self._check = check
        self._clock = clock
        self._looked_at = clock()
        self._before: tuple[str, float] = "", 0.0
        """The value before this one, and until when it is accepted."""
        self._stamp = _stamp(self._path) if self._path else None
        self._value = read_secret(self.name, self._path) if self._path else value
        if problem := self._problem(self._value):
            raise SettingsError("environment", self.name, problem)

    def __bool__(self) -> bool:
        """Whether there is one."""
        return bool(self._value)

    @property
    def value(self) -> str:
        """The secret as it is now. If its file is missing or no longer valid, the last value."""
        if self._path and self._clock() - self._looked_at >= POLL_S:
            self._look()
        return self._value

    def accepted(self) -> tuple[str, ...]:
        """The values that a service accepts: this one, and for a while the one before. Looks at the file at once, for
        those who send a new secret may have seen it earlier.
        """
        if self._path:
            self._look()
        before, until = self._before
        return (self._value, before) if before and self._clock() < until else (self._value,)

    def _look(self) -> None:
        assert self._path
        self._looked_at = self._clock()
        stamp = _stamp(self._path)
        if stamp is None or stamp == self._stamp:
            return
        try:
            found = read_secret(self.name, self._path)
        except SettingsError:
            return  # perhaps half written: read again at the next check
        if not self._problem(found):
            self._stamp = stamp
            if found != self._value:
                self._before, self._value = (self._value, self._looked_at + GRACE_S), found

    def _problem(self, value: str) -> str:
        return self._check(value) if self._check else ""


def header_problem(value: str) -> str:
    """A `check`: why a value cannot be in a header; empty if it can."""
    return "" if value.isascii() and value.isprintable() else "contains characters that are not allowed in a header"


def token_problem(value: str) -> str:
    """A `check` for tokens of the `Bearer` scheme."""
    return header_problem(value.replace(" ", "\n"))


def read_secret(name: str, path: Path) -> str:
    """Read the file without blanks around its content. Raises SettingsError with the variable's name."""
    try:
        found = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as e:
        raise SettingsError(
            "environment", name, f"{path}: {getattr(e, 'strerror', None) or 'not a text file'}"
        ) from None
    if not found:
        raise SettingsError("environment", name, f"{path}: the file is empty")
    return found


def secret_in(name: str, env: Mapping[str, str]) -> str:
    """The secret as it is now; empty if there is none. Raises SettingsError as `Secret` does."""
    return Secret(name, env).value


def file_variables(names: set[str] | frozenset[str]) -> frozenset[str]:
    """The variables that may name files with these secrets."""
    return frozenset(f"{name}{FILE}" for name in names)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
