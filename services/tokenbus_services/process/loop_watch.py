"""Ends a worker whose event loop no longer turns: `python loop_watch.py PAGE BLOCKED_S FIELDS`.

It is the worker's child, because a thread of the worker would need the interpreter's lock, which what blocks the loop
may hold. The worker counts the turns of its loop in the first bytes of the file with the descriptor PAGE, and holds the
other end of standard input for as long as it lives. FIELDS is text for the line in the log: members of a JSON object.

This file runs alone, without `site`: it imports nothing of tokenbus and no `json`, starts in milliseconds and has 5 MB,
where a fork of the worker has 30.
"""

import os
import select
import signal
import struct
import sys
import time

CHECK_S = 1.0
STACKS = signal.SIGXCPU
"""A worker that gets this signal writes the stack of each of its threads to its log."""
STACKS_S = 1.0
"""How long that may take."""
EXIT_STUCK = 7
"""Exit code of a worker that could not continue; and the signal that makes it exit with it."""
TURNS = struct.Struct("<Q")


def main(page: int, blocked_s: float, fields: str) -> None:
    """Watch the parent until it ends."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    worker = os.getppid()
    seen, still_s, before = 0, 0.0, time.monotonic()
    while not _has_ended(CHECK_S):
        now = time.monotonic()
        # Cap the step: if this process was stopped or had no CPU, its worker had none either.
        passed_s, before = min(now - before, 2 * CHECK_S), now
        (turns,) = TURNS.unpack(os.pread(page, TURNS.size, 0))
        if turns != seen:
            seen, still_s = turns, 0.0
        elif turns and not _is_stopped(worker):
            still_s += passed_s
        if still_s > blocked_s and os.getppid() == worker:
            at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            said = f'"pid": {worker}, "seconds": {round(still_s)}, "event": "event_loop_blocked", "level": "critical"'
            sys.stderr.write("{" + ", ".join(filter(None, (said, fields, f'"timestamp": "{at}"'))) + "}\n")
            sys.stderr.flush()
            for number in (STACKS, EXIT_STUCK, signal.SIGKILL):
                os.kill(worker, number)
                _has_ended(STACKS_S)


def _has_ended(wait_s: float) -> bool:
    return bool(select.select([sys.stdin.fileno()], [], [], wait_s)[0])


def _is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped the process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
