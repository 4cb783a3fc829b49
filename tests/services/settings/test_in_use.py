"""No setting is only there to be set."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

import tokenbus
import tokenbus_services
from tests.rows import over_rows
from tokenbus_services import settings

SOURCE = "".join(
    path.read_text()
    for package in (tokenbus, tokenbus_services)
    for path in Path(str(package.__file__)).parent.rglob("*.py")
    if not path.is_relative_to(Path(settings.__file__).parent)
)
TABLES = [table for table in vars(settings).values() if isinstance(table, type) and issubclass(table, msgspec.Struct)]
NAMES = sorted({name for table in TABLES for name in table.__struct_fields__})


@over_rows("name", NAMES)
def test_each_setting_is_read_somewhere(name: str) -> None:
    assert re.search(rf"\.{name}\b", SOURCE)
