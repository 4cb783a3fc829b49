"""The guards of the scripts: each line of Lua that refuses something. Without one, a play must go wrong."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import msgspec

from tokenbus.bus.scripts import script

_GUARD = re.compile(r"\s*if .+ then (return|error)\b.* end$")
_ROOM = Path(script.__file__).parent


class Guard(msgspec.Struct, frozen=True, kw_only=True):
    """One line of one file of Lua."""

    file: str
    """Within the scripts' package."""
    line: int
    """From 1."""
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.text}"


def guards(of: str = "") -> Iterator[Guard]:
    """The guards of the files whose names contain this, in their order."""
    for path in sorted(_ROOM.rglob("*.lua")):
        file = path.relative_to(_ROOM).as_posix()
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
            if of in file and _GUARD.fullmatch(line):
                yield Guard(file=file, line=number, text=line.strip())


def remove(guard: Guard) -> None:
    """Let this process load the scripts without it. Call it before one is loaded."""

    def without(package: str, resource: str) -> bytes | None:
        data = pkgutil.get_data(package, resource)
        there = Path(str(import_module(package).__file__)).parent / resource
        if data is None or there != _ROOM / guard.file:
            return data
        lines = data.decode().split("\n")
        assert lines[guard.line - 1].strip() == guard.text
        lines[guard.line - 1] = ""
        return "\n".join(lines).encode()

    setattr(script, "get_data", without)  # noqa: B010 - the module's own name of pkgutil's function
