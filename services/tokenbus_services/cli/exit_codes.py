"""How a command ends: its exit code and, after an error, its one line on stderr.

0 all well · 1 any other error · 2 a setting, an option or the request is at fault · 3 the server · 4 the run ended
incomplete · 5 failed · 6 cancelled · 7 a worker that could not go on (`tokenbus_services.runtime.supervision`) · 130
Ctrl-C. Where the reader of stdout goes away: 1, without a word.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Final

from tokenbus.errors import (
    RequestError,
    RunCancelled,
    RunFailed,
    RunIncomplete,
    ServerError,
    SettingsError,
    TokenbusError,
)
from tokenbus_services.cli.render.terminal import safe

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
    """The exit code of a command that ended in this error."""
    match error:
        case SettingsError() | RequestError():
            return USAGE
        case ServerError():
            return SERVER
        case RunIncomplete():
            return RUN_STATUS["incomplete"]
        case RunFailed():
            return RUN_STATUS["failed"]
        case RunCancelled():
            return RUN_STATUS["cancelled"]
        case _:
            return int(getattr(error, "exit_code", OTHER))


def debugging() -> bool:
    """Whether a person wants to see where an error came from."""
    return os.environ.get("TOKENBUS_LOG_LEVEL", "").lower() == "debug"


def report(error: Exception) -> int:
    """Say what went wrong, with a traceback only while debugging. Returns the exit code."""
    if debugging():
        traceback.print_exception(error, file=sys.stderr)
    known = isinstance(error, TokenbusError)
    print_error(str(error) if known else f"internal: {type(error).__name__}: {error} (--verbose shows where)")
    return code_of(error)


def print_error(problem: str) -> None:
    """The line of an error."""
    print(f"error: {safe(problem)}", file=sys.stderr, flush=True)


def abandon_stdout() -> int:
    """The reader of stdout is gone: what is still buffered goes nowhere, so that the interpreter's last flush is
    quiet. Returns the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return OTHER
