"""How much memory a process has, as the system reports it to another process."""

from __future__ import annotations

import resource
import sys


def rss_bytes(pid: int) -> int:
    """Return the process's resident memory in bytes; 0 if it is gone or the system does not report it."""
    if sys.platform != "linux":
        return 0
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0
