"""The script that writes refused requests to the dead stream (bus/dead_letters.py)."""

from __future__ import annotations

from tokenbus.bus.keys import DATA_FIELD
from tokenbus.bus.scripts.script import ScriptCall, script


@script(DATA_FIELD=DATA_FIELD)
def add_rejected(dead: str, rejected: str, *, most: int, most_rejected: int, data: bytes) -> ScriptCall:
    """Add a refused request to the dead stream of at most ``most`` entries, of which ``most_rejected`` are refused
    requests. Reply: the entry's id.
    """
    ...
