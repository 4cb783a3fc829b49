"""Total output limits of a run and of a turn, in addition to the limits per event and per block."""

from __future__ import annotations

from tokenbus.core.run.state import RunState
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import CONTROL_ATTEMPT, EventFrame


def count_bytes(s: RunState, frame: EventFrame, size: int) -> ErrorInfo | None:
    """Count a frame of ``size`` bytes before it is applied; return an error if a limit is exceeded.

    Frames of past attempts count too, because they had to be read. A replay reads the same frames, so its counts are
    equal.
    """
    rules = s.accepted.rules
    s.run_bytes += size
    if frame.attempt != CONTROL_ATTEMPT:
        s.turn_bytes += size
    if s.turn_bytes > rules.turn_bytes:
        problem = f"turn {s.turn} has more than {rules.turn_bytes} bytes of events"
        return ErrorInfo(code="turn_too_large", kind="limit", message=problem)
    if s.run_bytes > rules.run_bytes:
        problem = f"the run has more than {rules.run_bytes} bytes of events"
        return ErrorInfo(code="run_too_large", kind="limit", message=problem)
    return None
