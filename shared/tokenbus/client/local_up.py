"""The `tokenbus up` that runs on this machine: the file it keeps in its data directory, and how others read it.

A lock on `up.json` says that it runs, and ends with the process however that ends; the file's content says the rest.
So a file that a crash left behind is never taken for a running server.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

FILE_NAME = "up.json"
DATA_DIRECTORY = ".tokenbus"
"""Where `tokenbus up` keeps its files unless its settings name another directory."""


class Running(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The content of the file."""

    pid: int
    redis_url: str | None = None
    """None until its server is there."""
    mock: bool = False
    """The mock provider runs too."""


def running_in(directory: Path) -> Running | None:
    """The `tokenbus up` that runs in the directory; None if none does, or if the file is another user's."""
    try:
        import fcntl
    except ImportError:
        return None  # a platform without file locks has no `tokenbus up`
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
    """What an open file says; None if that is not whole."""
    try:
        return msgspec.json.decode(os.pread(file, 65_536, 0), type=Running)
    except msgspec.DecodeError:
        return None


def data_directory(env: Mapping[str, str]) -> Path:
    """Where a `tokenbus up` of this directory and environment keeps its files."""
    return Path(env.get("TOKENBUS_DATA") or DATA_DIRECTORY)
