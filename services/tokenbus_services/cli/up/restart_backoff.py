"""Decides when to restart a child that died. Uses no clock."""

from __future__ import annotations

import signal
from typing import Final

from tokenbus_services.cli import exit_codes as ending

FIRST_PAUSE_S: Final = 0.25
LONGEST_PAUSE_S: Final = 15.0
HEALTHY_S: Final = 60.0
_LEAST_SIGNAL = 128


class RestartBackoff:
    """The restart delays of one child: doubled each time up to a limit, reset after a healthy minute."""

    def __init__(self) -> None:
        self._next_s = FIRST_PAUSE_S

    def pause_s(self, *, ready_for_s: float | None) -> float:
        """Return how long to wait before the next start. ``ready_for_s``: how long the child was ready; None: never."""
        if ready_for_s is not None and ready_for_s >= HEALTHY_S:
            self._next_s = FIRST_PAUSE_S
        pause_s = self._next_s
        self._next_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return pause_s


def will_not_recover(code: int, *, was_ready: bool) -> bool:
    """Whether a restart cannot help: the child was never ready and reported a configuration error."""
    return code == ending.USAGE and not was_ready


def how_it_ended(code: int) -> str:
    """Describe the exit code; above 128 it means a signal, as in a shell."""
    if code > _LEAST_SIGNAL:
        try:
            return f"was ended by {signal.Signals(code - _LEAST_SIGNAL).name}"
        except ValueError:
            pass
    return f"ended with exit code {code}"
