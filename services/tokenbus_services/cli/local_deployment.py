"""Claims a data directory: one `tokenbus up` at a time, with a file that says where its server is.

The lock and the file are those of `tokenbus.client.local_up`, with which clients find it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tokenbus.client.local_up import FILE_NAME, Running, read
from tokenbus.errors import SettingsError

_WAIT_S = 0.5
_POLL_S = 0.02


class DirectoryClaim:
    """A data directory claimed by this process."""

    def __init__(self, file: int) -> None:
        self._file = file

    def announce(
        self, redis_url: str | None, *, mock: bool = False, blobs_url: str | None = None, deployment: str = ""
    ) -> None:
        """Publish where the server and the blob service are, and whether the mock provider runs."""
        running = Running(pid=os.getpid(), redis_url=redis_url, mock=mock, blobs_url=blobs_url, deployment=deployment)
        data = msgspec.json.encode(running)
        os.pwrite(self._file, data, 0)
        os.ftruncate(self._file, len(data))


@contextmanager
def claim(directory: Path) -> Generator[DirectoryClaim]:
    """Claim the directory, creating it if necessary. Raises SettingsError if another `tokenbus up` has claimed it."""
    import fcntl

    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = os.open(directory / FILE_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as e:
        raise SettingsError("settings", "data_dir", f"{directory}: {e.strerror}") from None
    try:
        # `running_in` holds the lock for an instant when it looks.
        deadline = time.monotonic() + _WAIT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    other = read(file)
                    who = f"process {other.pid}" if other else "another process"
                    problem = f"{who} runs `tokenbus up` in {directory.resolve()}: stop it, or choose another --data"
                    raise SettingsError("settings", "data_dir", problem) from None
                time.sleep(_POLL_S)
        claimed = DirectoryClaim(file)
        claimed.announce(None)
        yield claimed
    finally:
        os.close(file)
