"""The errors as programs see them: one tree, each with a code of its own, none that nothing raises."""

from __future__ import annotations

import re
from pathlib import Path

import tokenbus
import tokenbus_services
from tests.rows import over_rows
from tokenbus import errors
from tokenbus.errors import TokenbusError

ALL: list[type[TokenbusError]] = [
    error for error in vars(errors).values() if isinstance(error, type) and issubclass(error, TokenbusError)
]
BASES = {base for error in ALL for base in error.__mro__[1:]}
SOURCE = "".join(
    path.read_text()
    for package in (tokenbus, tokenbus_services)
    for path in Path(str(package.__file__)).parent.rglob("*.py")
    if path != Path(str(errors.__file__))
)
RAISED = {name for names in re.findall(r"\b(\w+)\(|\b(\w+) if |else (\w+)\b", SOURCE) for name in names}


def test_each_has_a_code_of_its_own() -> None:
    codes = [vars(error).get("code") for error in ALL]
    assert None not in codes
    assert len(set(codes)) == len(codes)


@over_rows("error", ALL)
def test_each_error_is_below_its_base_class_in_the_docstrings_tree(error: type[TokenbusError]) -> None:
    lines = str(errors.__doc__).splitlines()
    [at] = [n for n, line in enumerate(lines) if re.search(rf"(^|[ ─]){error.__name__}( |$)", line)]
    if error is not TokenbusError:
        depth = lines[at].index(error.__name__)
        above = next(line for line in reversed(lines[:at]) if 0 < len(line) - len(line.lstrip(" │├└─")) < depth)
        assert above.split("─")[-1].split()[0] == error.__mro__[1].__name__


@over_rows("error", [error for error in ALL if error not in BASES])
def test_each_is_raised_somewhere(error: type[TokenbusError]) -> None:
    assert error.__name__ in RAISED
