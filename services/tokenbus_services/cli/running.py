"""Who runs in a data directory: one `tokenbus up` at a time, and where its server is.

A lock on `up.json` says that it runs, and ends with the process however that ends; the file's content says the rest.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tokenbus.errors import SettingsError

NAME = "up.json"
_WAIT_S = 0.5
_POLL_S = 0.02


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file."""

    pid: int
    redis_url: str | None = None
    """None until its server is there."""


class Claim:
    """A data directory in this process's hands."""

    def __init__(self, file: int) -> None:
        self._file = file

    def announce(self, redis_url: str | None) -> None:
        """Tell others where the server is."""
        data = msgspec.json.encode(Running(pid=os.getpid(), redis_url=redis_url))
        os.pwrite(self._file, data, 0)
        os.ftruncate(self._file, len(data))


@contextmanager
def claim(directory: Path) -> Generator[Claim]:
    """Take the directory, made where it is missing. Raises SettingsError where another `tokenbus up` has it."""
    import fcntl

    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = os.open(directory / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as e:
        raise SettingsError("settings", "data_dir", f"{directory}: {e.strerror}") from None
    try:
        # `server_in` holds the lock for an instant when it looks.
        deadline = time.monotonic() + _WAIT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    other = _read(file)
                    who = f"process {other.pid}" if other else "another process"
                    problem = f"{who} runs `tokenbus up` in {directory.resolve()}: stop it, or choose another --data"
                    raise SettingsError("settings", "data_dir", problem) from None
                time.sleep(_POLL_S)
        claimed = Claim(file)
        claimed.announce(None)
        yield claimed
    finally:
        os.close(file)


def server_in(directory: Path) -> str | None:
    """The url of the server of the `tokenbus up` that runs in the directory; None where none runs."""
    import fcntl

    try:
        file = os.open(directory / NAME, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        running = _read(file)
        return running.redis_url if running else None
    else:
        return None
    finally:
        os.close(file)


def _read(file: int) -> Running | None:
    try:
        return msgspec.json.decode(os.pread(file, 65_536, 0), type=Running)
    except msgspec.DecodeError:
        return None
