"""Finds an executor that is gone, stuck in a policy, silent or too large, by its marks and by what the system says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from tokenbus_services.policy_stage.blame import End
from tokenbus_services.policy_stage.executor.client import ExecutorProcess
from tokenbus_services.policy_stage.executor.host_process import is_gone, rss_bytes
from tokenbus_services.policy_stage.executor.marks import MarkedCall

BLOCKED_S = 1.0
"""A shared executor stuck in one step of a call for this long is left to that call's run."""
SILENT_S = 10.0
"""An executor whose event loop has not turned for this long, without a call in progress, counts as dead."""
DEAD_S = 0.5
"""How long the connection of an executor whose process is gone may stay open: until everything sent is read."""


def examine(
    process: ExecutorProcess, passed_s: float, *, timeouts_s: Sequence[float], memory_bytes: int
) -> End | MarkedCall | Literal["gone"] | None:
    """Return why the executor must be killed, the call that it must be left to, `gone`, or None if it is well.

    ``passed_s``: time since the last look, in which the worker could see progress. ``timeouts_s``: of each policy.
    """
    if is_gone(process.pid):
        process.dead_s += passed_s
        return "gone" if process.dead_s > DEAD_S else None
    marks = process.page.read()
    if marks.call and marks.step == process.step:
        process.still_s += passed_s
        if process.still_s > timeouts_s[marks.call.policy]:
            return "blocked"
        if process.still_s > BLOCKED_S and process.serves == "all":
            return marks.call
        if process.still_s > BLOCKED_S and process.serves == "restricted":
            return "stalled"  # its run waits for a place: there is no bound on executors left to one
    else:
        process.step, process.still_s = marks.step, 0.0
    if marks.call or marks.beats != process.beats or not (process.runs or process.emptied):
        process.beats, process.silent_s = marks.beats, 0.0
    else:
        process.silent_s += passed_s
        if process.silent_s > SILENT_S:
            return "blocked"
    return "memory" if rss_bytes(process.pid) - process.base_bytes > memory_bytes else None
