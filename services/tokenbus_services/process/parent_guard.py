"""Runs one program for as long as the process that started this one lives: `python guard.py PROGRAM ARG…`.

The parent holds the other end of standard input. However it ends, `kill -9` included, that end closes: the program
gets SIGTERM, and SIGKILL where that is not enough. A pipe tells of the death of a process on every system and
whatever thread made it; Linux's parent-death signal alone goes by the thread. It has its place one floor
down: where this process is killed, the program gets its SIGTERM from the kernel.

The program's id is the one line on standard output; its own output goes to standard error. A file of its own, run
without `site`, so that it starts in milliseconds and imports nothing of tokenbus.
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
    """Run the program to its end. Returns its exit status as a shell would give it."""
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
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork: the child calls it and nothing more
    guard = os.getpid()

    def in_child() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != guard:  # it died in between
            os._exit(1)

    return in_child


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
