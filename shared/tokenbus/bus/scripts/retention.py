"""Makes room on a server that is nearly full: ended runs go before their time."""

from __future__ import annotations

from collections.abc import Sequence

from tokenbus.bus.run_record import RECORD
from tokenbus.bus.scripts.script import ScriptCall, script


@script()
def memory(key: str, *, share: float, most: int) -> ScriptCall:
    """Memory in use on the node that has the key, in thousandths of the least of ``share`` of its ``maxmemory`` and
    ``most`` bytes; 0 is no bound.
    """
    ...


def forget(ended_runs: str, keys: Sequence[tuple[str, str]], *, runs: Sequence[str]) -> ScriptCall:
    """Delete runs that have ended. ``keys``: the hash and the log of each. Reply: how many do not stay. A run that is
    open again, and one whose keys are gone, is only taken off the list. One that waits for its recorder stays.
    """
    return _forget(ended_runs, [key for pair in keys for key in pair], runs=runs)


@script(RECORD=RECORD)
def _forget(ended_runs: str, keys: Sequence[str], *, runs: Sequence[str]) -> ScriptCall: ...


@script()
def erase(run_key: str, log: str, tape: str, indexes: Sequence[str], *, run: str) -> ScriptCall:
    """Delete the keys of a run that is not open, and its places in the index. Reply: 1; 0 if the run is open."""
    ...
