"""The guards of the scripts: each line of Lua that refuses something. Without one, a play must go wrong.

guards.json says of each that was tried which seed went wrong without it; docs/explain/chaos.md has it as a table.
"""

from __future__ import annotations

import pkgutil
import re
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import msgspec

from tokenbus.bus.scripts import script

_GUARD = re.compile(r"\s*if .+ then (return|error)\b.* end$")
_ROOM = Path(script.__file__).parent
_TRIALS = Path(__file__).with_name("guards.json")
PAGE = Path(__file__).parents[2] / "docs/explain/chaos.md"
_BEGIN, _END = "<!-- written by make simulate-faults GUARDS= -->\n", "<!-- end -->\n"


class Guard(msgspec.Struct, frozen=True, kw_only=True):
    """One line of one file of Lua."""

    file: str
    """Within the scripts' package."""
    line: int
    """From 1."""
    text: str
    name: str
    """The text, with a number if the file has it again."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.text}"


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What the plays without a guard showed."""

    file: str
    guard: str
    seed: int | None = None
    """The one that went wrong; None: none did."""
    seeds: int
    """How many were played."""


def trials() -> list[Trial]:
    """Those of guards that the scripts still have, in the order of the scripts."""
    places = {(guard.file, guard.name): n for n, guard in enumerate(guards())}
    found = msgspec.json.decode(_TRIALS.read_bytes(), type=list[Trial])
    known = [trial for trial in found if (trial.file, trial.guard) in places]
    return sorted(known, key=lambda trial: places[trial.file, trial.guard])


def keep_trial(guard: Guard, seed: int | None, seeds: int) -> None:
    """Write down what came of it, and the page anew. A death is kept; plays without one add up."""
    new = Trial(file=guard.file, guard=guard.name, seed=seed, seeds=seeds)
    before = {(trial.file, trial.guard): trial for trial in trials()}
    if (old := before.get((new.file, new.guard))) and seed is None:
        new = msgspec.structs.replace(old, seeds=old.seeds + (seeds if old.seed is None else 0))
    before[new.file, new.guard] = new
    _TRIALS.write_bytes(msgspec.json.format(msgspec.json.encode([*before.values()])) + b"\n")
    write_table()


def write_table() -> None:
    """Write the page's table anew, without guards that the scripts no longer have."""
    text = PAGE.read_text(encoding="utf-8")
    head, _, rest = text.partition(_BEGIN)
    PAGE.write_text(head + _BEGIN + table() + _END + rest.partition(_END)[2], encoding="utf-8")


def table() -> str:
    """The page's table."""
    known = trials()
    dead = sum(trial.seed is not None for trial in known)
    rows = [
        f"| `{trial.file}` | `{trial.guard.replace('|', chr(92) + '|')}` "
        f"| {'none' if trial.seed is None else trial.seed} | {trial.seeds} |"
        for trial in known
    ]
    head = f"{len(known)} guards were tried so far, and {dead} of them have a seed that goes wrong without them."
    return "\n".join((head, "", "| script | guard | seed | played |", "|---|---|---|---|", *rows, ""))


def guards(of: str = "") -> Iterator[Guard]:
    """The guards of the files whose names contain this, in their order."""
    for path in sorted(_ROOM.rglob("*.lua")):
        file = path.relative_to(_ROOM).as_posix()
        before = Counter[str]()
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
            if of in file and _GUARD.fullmatch(line):
                text = line.strip()
                before[text] += 1
                name = text if before[text] == 1 else f"{text} ({before[text]})"
                yield Guard(file=file, line=number, text=text, name=name)


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
