"""Every script opens with its contract: what it does, KEYS, ARGV, reply, and why it is one atomic step."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import pytest

from tokenbus.bus.scripts.script import LuaScript
from tokenbus_services.cli.scripts import all_scripts


def made_by_the_bus() -> Iterator[LuaScript]:
    """The scripts that its modules hold; `all_scripts` also has those of tests in this process."""
    assert all_scripts()  # imports the modules
    for name, module in sorted(sys.modules.items()):
        if name.startswith("tokenbus.") and name != LuaScript.__module__:  # it has the list of all that were made
            for value in vars(module).values():
                several = value.values() if isinstance(value, dict) else [value]
                yield from (one for one in several if isinstance(one, LuaScript))


SCRIPTS = list({one.sha: one for one in made_by_the_bus() if not one.name.endswith(" of many")}.values())


def contract(one: LuaScript) -> dict[str, str]:
    """The parts of the comment that the script opens with, by their names."""
    head = re.match(r"\s*((?:-- [^\n]*\n)+)", one.text)
    assert head, f"{one.name} does not open with a comment"
    parts = re.split(r"^-- (KEYS|ARGV|Reply|Atomic): ", head[1], flags=re.MULTILINE)
    return {"what": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


@pytest.mark.parametrize("one", SCRIPTS, ids=lambda one: one.name)
def test_a_script_opens_with_its_contract_and_uses_no_key_or_argument_beyond_it(one: LuaScript) -> None:
    declared = contract(one)
    assert declared.keys() == {"what", "KEYS", "ARGV", "Reply", "Atomic"}
    for name in ("KEYS", "ARGV"):
        numbers = {int(n) for n in re.findall(r"\b\d+\b", declared[name])}
        used = {int(n) for n in re.findall(rf"{name}\[(\d+)\]", one.text)}
        most = max(numbers, default=0)
        assert all(n in numbers or ("and further" in declared[name] and n > most) for n in used), (name, used)
