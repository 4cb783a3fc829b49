"""Raises the limit of open files, and so of sockets, of a process."""

from __future__ import annotations

from contextlib import suppress

import structlog

MAX_OPEN_FILES = 65_536
"""More than any worker needs. Some systems report an infinite limit but reject numbers that are too large."""

_log = structlog.stdlib.get_logger()


def raise_open_files(needed: int) -> int | None:
    """Raise this process's soft limit of open files as far as allowed. Return the resulting limit; None: unlimited.

    Systems start programs with 1,024 for the sake of ``select``, which no worker uses. Logs a warning if the limit
    stays below ``needed``.
    """
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = MAX_OPEN_FILES if hard == unlimited else min(hard, MAX_OPEN_FILES)
    if soft != unlimited and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == unlimited:
        return None
    if soft < needed:
        _log.warning("open_files_low", limit=soft, needed=needed)
    return soft
