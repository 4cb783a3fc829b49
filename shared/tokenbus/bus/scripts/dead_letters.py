"""The scripts that write to the dead stream (bus/dead_letters.py). Sent again, they add nothing."""

from __future__ import annotations

from tokenbus.bus.keys import DATA_FIELD
from tokenbus.bus.scripts.script import ScriptCall, script


@script(DATA_FIELD=DATA_FIELD)
def add(dead: str, added: str, *, most: int, keep_ms: int, data: bytes) -> ScriptCall:
    """Add an entry to the dead stream of at most ``most`` entries, unless it was within the last ``keep_ms``. Reply:
    the entry's id, or '' if it was.
    """
    ...


@script(DATA_FIELD=DATA_FIELD)
def add_rejected(
    dead: str, rejected: str, added: str, *, most: int, most_rejected: int, keep_ms: int, data: bytes
) -> ScriptCall:
    """Add a refused request to the dead stream of at most ``most`` entries, of which ``most_rejected`` are refused
    requests, unless it was within the last ``keep_ms``. Reply: the entry's id, or '' if it was.
    """
    ...
