"""Finds the `tokenbus up` running on this machine, through the file in its data directory.

A lock on `up.json` shows that it is running; the lock ends with the process, however it ends. So a file left behind by
a crash is never mistaken for a running server.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

FILE_NAME = "up.json"
DATA_DIRECTORY = ".tokenbus"
"""Data directory of `tokenbus up`, unless its settings name another one."""


class Running(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The content of the file."""

    pid: int
    redis_url: str | None = None
    """None until its server is up."""
    mock: bool = False
    """Whether the mock provider runs too."""
    blobs_url: str | None = None
    """Address of its blob service; None if it runs none."""
    deployment: str = ""
    """Id that its blob service answers with."""


def running_in(directory: Path) -> Running | None:
    """Return the `tokenbus up` running in the directory; None if there is none or the file belongs to another user."""
    try:
        import fcntl
    except ImportError:
        return None  # no file locks on this platform, so no `tokenbus up`
    try:
        file = os.open(directory / FILE_NAME, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(file).st_uid != os.getuid():
            return None
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return read(file)
    else:
        return None
    finally:
        os.close(file)


def read(file: int) -> Running | None:
    """Decode an open file; None if its content is incomplete."""
    try:
        return msgspec.json.decode(os.pread(file, 65_536, 0), type=Running)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def data_directory(env: Mapping[str, str]) -> Path:
    """Data directory of a `tokenbus up` in this directory and environment."""
    return Path(env.get("TOKENBUS_DATA") or DATA_DIRECTORY)
