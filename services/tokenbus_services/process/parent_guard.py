"""Runs one program for as long as the process that started this one lives: `python guard.py PROGRAM ARG…`.

The parent holds the other end of standard input. However the parent ends, including `kill -9`, that end closes: the
program then gets SIGTERM, and SIGKILL if that is not enough. A pipe reports the parent's death on every system and for
every thread; Linux's parent-death signal depends on the thread that forked. That signal is used one level down: if this
process is killed, the kernel sends the program SIGTERM.

The program's process id is the only line on standard output; its own output goes to standard error. This file runs
alone, without `site`, so it starts in milliseconds and imports nothing of tokenbus.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

TERM_GRACE_S = 8.0
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main(command: list[str]) -> int:
    """Run the program to its end; return its exit status as a shell reports it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        program = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            preexec_fn=_dies_with_guard(),  # noqa: PLW1509 - there is one thread as yet
        )
    except OSError as e:
        sys.exit(f"{command[0]}: {e.strerror}")
    os.write(sys.stdout.fileno(), b"%d\n" % program.pid)
    threading.Thread(target=_end_with_parent, args=(program,), daemon=True).start()
    status = program.wait()
    return status if status >= 0 else 128 - status


def _end_with_parent(program: "subprocess.Popen[bytes]") -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    program.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        program.wait(TERM_GRACE_S)
        return
    program.kill()


def _dies_with_guard() -> Callable[[], None] | None:
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork: the child makes only this call
    guard = os.getpid()

    def in_child() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != guard:  # the guard died in between
            os._exit(1)

    return in_child


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
