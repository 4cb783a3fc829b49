"""When a child that died is started again: rules without a clock."""

from __future__ import annotations

import signal
from typing import Final

from tokenbus_services.cli import exit_codes as ending

FIRST_PAUSE_S: Final = 0.25
LONGEST_PAUSE_S: Final = 15.0
HEALTHY_S: Final = 60.0
_LEAST_SIGNAL = 128


class RestartBackoff:
    """The restarts of one child: each pause is twice the one before, up to a bound; a healthy minute forgets them."""

    def __init__(self) -> None:
        self._next_s = FIRST_PAUSE_S

    def pause_s(self, *, ready_for_s: float | None) -> float:
        """The child died, ready for this long, None for never: how long to wait before its next start."""
        if ready_for_s is not None and ready_for_s >= HEALTHY_S:
            self._next_s = FIRST_PAUSE_S
        pause_s = self._next_s
        self._next_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return pause_s


def will_not_recover(code: int, *, was_ready: bool) -> bool:
    """Whether another start cannot help: a child that was never ready says that it is set up wrongly."""
    return code == ending.USAGE and not was_ready


def how_it_ended(code: int) -> str:
    """The exit code in words; above 128 it tells a signal, as in a shell."""
    if code > _LEAST_SIGNAL:
        try:
            return f"was ended by {signal.Signals(code - _LEAST_SIGNAL).name}"
        except ValueError:
            pass
    return f"ended with exit code {code}"
