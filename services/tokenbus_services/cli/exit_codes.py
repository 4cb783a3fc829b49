"""Exit codes of commands, and the one-line error message on stderr.

0 success · 1 any other error · 2 invalid setting, option or request · 3 server error · 4 run incomplete · 5 run failed
· 6 run cancelled · 7 a worker that could not continue (`tokenbus_services.runtime.supervision`) · 130 Ctrl-C. If the
reader of stdout goes away: 1, without a message.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Final

from tokenbus import errors
from tokenbus_services.cli.render.output import safe

OTHER: Final = 1
USAGE: Final = 2
SERVER: Final = 3
INTERRUPTED: Final = 130

RUN_STATUS: Final = {
    "completed": 0,
    "incomplete": 4,
    "failed": 5,
    "cancelled": 6,
}


def code_of(error: Exception) -> int:
    match error:
        case errors.SettingsError() | errors.RequestError():
            return USAGE
        case errors.ServerError():
            return SERVER
        case errors.RunIncomplete():
            return RUN_STATUS["incomplete"]
        case errors.RunFailed():
            return RUN_STATUS["failed"]
        case errors.RunCancelled():
            return RUN_STATUS["cancelled"]
        case _:
            return int(getattr(error, "exit_code", OTHER))


def debugging() -> bool:
    """Whether the user asked for tracebacks."""
    return os.environ.get("TOKENBUS_LOG_LEVEL", "").lower() == "debug"


def report(error: Exception, advice: str = "") -> int:
    """Print the error and the advice, with a traceback only while debugging; return the exit code."""
    if debugging():
        traceback.print_exception(error, file=sys.stderr)
    known = isinstance(error, errors.TokenbusError)
    print_error(f"{error}{advice}" if known else f"internal: {type(error).__name__}: {error} (--verbose shows where)")
    return code_of(error)


def print_error(problem: str) -> None:
    print(f"error: {safe(problem)}", file=sys.stderr, flush=True)


def abandon_stdout() -> int:
    """Discard buffered output after the reader of stdout went away, so that the interpreter's last flush does not
    fail. Returns the exit code.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return OTHER
