"""The processes of a bench: starts them, waits for them, reads their CPU, and stops all of them, even after an error.

Each runs under `tokenbus_services.process.parent_guard`, which ends it when the bench is gone, also after a `kill -9`.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tokenbus_services.process import parent_guard as guard

ROOT = Path(__file__).parents[2]
START_S = 180.0
_CPU_CLOCK = 2
"""CPUCLOCK_SCHED, the last part of the id of a process's CPU clock: see clock_getcpuclockid(3)."""


def cpu_s(pid: int) -> float:
    """User and system time so far of a process and of its running children, such as policy executors."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return _own_cpu_s(pid) + sum(cpu_s(int(child)) for child in children)


def _own_cpu_s(pid: int) -> float:
    """In nanoseconds; the fields of /proc/PID/stat count hundredths of a second."""
    return time.clock_gettime_ns(~pid << 3 | _CPU_CLOCK) / 1e9


def resident_kb(pid: int) -> int:
    """Private memory of a process, plus its share of the shared memory."""
    found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii"), re.MULTILINE)
    return int(found[1]) if found else 0


class Process:
    """One child and its log."""

    def __init__(self, name: str, guarding: subprocess.Popen[bytes], log: Path) -> None:
        assert guarding.stdout
        self.name = name
        self.log = log
        self.pid = int(guarding.stdout.readline() or 0)
        self._guard = guarding

    def check(self) -> None:
        """Raises RuntimeError, with the end of its log, if the process has ended."""
        if self._guard.poll() is not None:
            raise RuntimeError(f"{self.name} ended:\n{self.log.read_text(errors='replace')[-3000:]}")

    def end(self) -> None:
        """Send SIGTERM."""
        assert self._guard.stdin
        self._guard.stdin.close()

    def wait(self) -> None:
        """Wait until it has ended; its guard kills it if SIGTERM does not end it."""
        self._guard.wait()
        assert self._guard.stdout
        self._guard.stdout.close()


class Processes:
    """All children; a context manager that stops all of them."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._all: list[Process] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._all:
            process.end()
        for process in self._all:
            process.wait()

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name."""
        return {process.name: process.pid for process in self._all}

    def start(self, name: str, module: str, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        """Run a Python module under the guard."""
        self.run(name, [sys.executable, "-m", module, *arguments], env=env)

    def run(self, name: str, command: Sequence[str], *, env: Mapping[str, str] | None = None) -> None:
        """Run a command under the guard."""
        log = self._logs / f"{name}.log"
        with log.open("wb") as errors:
            guarding = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **(env or {})},
                cwd=ROOT,
                start_new_session=True,  # The bench handles Ctrl-C, and stops the others in order
            )
        self._all.append(Process(name, guarding, log))

    def check(self) -> None:
        """Raises RuntimeError if a process has ended."""
        for process in self._all:
            process.check()

    def until(self, condition: Callable[[], bool], what: str, timeout_s: float = START_S) -> None:
        """Wait for a condition. Raises RuntimeError if a process ends during the wait, and TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            self.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {timeout_s:g} s")
            time.sleep(0.02)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def listens(port: int) -> bool:
    """Whether a process accepts connections on this port of 127.0.0.1."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2):
            return True
    except OSError:
        return False
