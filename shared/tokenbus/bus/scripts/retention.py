"""Makes room on a server that is nearly full: ended runs go before their time."""

from __future__ import annotations

from collections.abc import Sequence

from tokenbus.bus.run_record import ARCHIVE, ENDED_AT, RECORD
from tokenbus.bus.scripts.script import ScriptCall, script


@script()
def memory(key: str, *, share: float, most: int) -> ScriptCall:
    """Memory in use on the node that has the key, in thousandths of the least of ``share`` of its ``maxmemory`` and
    ``most`` bytes; 0 is no bound.
    """
    ...


def forget(
    ended_runs: str, keys: Sequence[tuple[str, str, str]], *, runs: Sequence[str], held_after: int = 0
) -> ScriptCall:
    """Delete runs that have ended. ``keys``: what is kept of each (`Keys.kept_of`). Reply: how many do not stay. A run
    that is open again, and one whose keys are gone, is only taken off the list. One that is to be recorded stays, and
    one that is to be archived, unless it ended before ``held_after`` (in ms of the server's clock).
    """
    return _forget(ended_runs, [key for of_run in keys for key in of_run], held_after=held_after, runs=runs)


@script(RECORD=RECORD, ARCHIVE=ARCHIVE, ENDED_AT=ENDED_AT)
def _forget(ended_runs: str, keys: Sequence[str], *, held_after: int, runs: Sequence[str]) -> ScriptCall: ...


@script()
def erase(run_key: str, log: str, tape: str, tree: str, indexes: Sequence[str], *, run: str) -> ScriptCall:
    """Delete the keys of a run that is not open, and its places in the index. Reply: 1; 0 if the run is open."""
    ...
