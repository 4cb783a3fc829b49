"""Which runs a command is about: `--state`, `--tenant`, `--provider`, `--older-than`, `--prefix`."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from tokenbus import Client, RunInfo
from tokenbus.client.run_list import run_filter
from tokenbus.errors import SettingsError

_UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_AGE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)", re.ASCII)


class RunChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The options, as they were given."""

    states: tuple[str, ...] = ()
    tenant: str | None = None
    provider: str | None = None
    older_than: str | None = None
    prefix: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing was chosen."""
        return self == RunChoice()

    def check(self) -> None:
        """Raise SettingsError if a value is wrong."""
        self._arguments()

    def runs(self, bus: Client, *, limit: int | None = None, oldest_first: bool = False) -> AsyncGenerator[RunInfo]:
        """The chosen runs. Raises SettingsError."""
        return bus.runs(**self._arguments(), limit=limit, oldest_first=oldest_first)

    def _arguments(self) -> dict[str, Any]:
        age_s = None if self.older_than is None else seconds(self.older_than)
        given: dict[str, Any] = {
            "state": self.states or None,
            "tenant": self.tenant,
            "provider": self.provider,
            "older_than": age_s,
            "prefix": self.prefix,
        }
        try:
            run_filter(**given)
        except ValueError as e:
            name, _, problem = str(e).partition(": ")
            raise SettingsError("options", f"--{name.replace('_', '-')}", problem) from None
        return given


def seconds(age: str) -> float:
    """The seconds of an age like ``90``, ``10m`` or ``1.5h``. Raises SettingsError."""
    if not (found := _AGE.fullmatch(age.strip())):
        problem = f"{age!r} is not an age: use a number followed by s, m, h or d (10m)"
        raise SettingsError("options", "--older-than", problem)
    return float(found[1]) * _UNITS_S[found[2]]


def age_text(age_ms: int) -> str:
    """An age in its largest unit: ``12s``, ``3m``, ``5h``, ``2d``."""
    age_s = max(0, age_ms) // 1000
    unit = next((unit for unit in ("d", "h", "m") if age_s >= _UNITS_S[unit]), "s")
    return f"{age_s // _UNITS_S[unit]}{unit}"
