"""What the system says of a process of this host."""

from __future__ import annotations

import os
import resource
import sys


def is_gone(pid: int) -> bool:
    """Whether no process has this id any more."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # it runs as another user
        pass
    return False


def rss_bytes(pid: int) -> int:
    """Return the process's resident memory in bytes; 0 if it is gone or the system does not report it."""
    if sys.platform != "linux":
        return 0
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0
