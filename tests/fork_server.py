"""A process that has imported the services once, and forks one that runs a `tokenbus` command whenever it is asked.

A start costs hundredths of a second in place of a second of imports. What is forked is a process like any other: it has
an environment, a working directory, output files, signal handlers and a session of its own, inherits no open file, and
ends as an interpreter does. Two things it shares with the others of its server: the seed of string hashes, and what was
imported. Where that matters, and for variables that an interpreter reads at its start (PYTHONPATH), a test takes a true
process.

The server is single-threaded and knows no event loop: it answers each JSON line on its standard input by one on its
standard output, and by the number of that line: who asked may have been interrupted before it read its answer. When the
input ends, however its parent ended, all that it forked is killed.
``python -m tests.fork_server [MODULE…]``; the modules are imported before the first fork, too.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Self, TypeVar

import msgspec

from tests.waiting import eventually

ROOT = Path(__file__).parents[1]
_ANSWERED_S = 120.0
"""Longest wait for an answer of the server: the first one waits for its imports, on a machine that may be loaded."""
_ENDED_S = 60.0
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
T = TypeVar("T")


class Start(msgspec.Struct, tag="start"):
    """Fork a process. The answer is its id."""

    arguments: list[str]
    """Of the command `tokenbus`."""
    env: dict[str, str]
    cwd: str
    stdin: str
    """The file that its standard input comes from."""
    stdout: str
    """The file that its standard output is appended to."""
    stderr: str
    prepare: list[str]
    """Empty, or `module:function` and its arguments: called in the new process before the command."""


class Reap(msgspec.Struct, tag="reap"):
    """Ask which processes have ended. The answer is a dictionary: by id the exit code, negative for a signal."""

    kill: bool = False
    """Kill all that still run, and wait for them."""


class Answer(msgspec.Struct):
    number: int
    """Of the line that it answers, from 1."""
    value: int | dict[int, int]


class Forked:
    """A process that was forked; used like one of `asyncio.subprocess`."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server = server
        self.pid = pid

    @property
    def returncode(self) -> int | None:
        """None while it runs, else its exit code, negative for a signal."""
        return self._server.exit_code(self.pid)

    def send_signal(self, number: int) -> None:
        if self.returncode is None:  # an id is not reused before the server has reported the end
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    async def wait(self, *, timeout: float = _ENDED_S) -> int:
        """Wait until it has ended. Its exit code."""

        def has_ended() -> bool:
            return self.returncode is not None

        await eventually(has_ended, timeout=timeout)
        assert self.returncode is not None
        return self.returncode


class ForkServer:
    """The server as its parent sees it. A context manager; at its end all that was forked is killed."""

    def __init__(self, *preload: str) -> None:
        """``preload``: modules to import beside the services'."""
        self._exit_codes: dict[int, int] = {}
        self._asked = 0
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fork_server", *preload],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # an answer in a buffer would not be seen by select()
            start_new_session=True,  # a Ctrl-C is for the tests, which end what they started
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(
        self,
        *arguments: str,
        stdout: Path,
        stderr: Path,
        stdin: Path | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        prepare: Sequence[str] = (),
    ) -> Forked:
        """Run `tokenbus` with these arguments. ``env`` is its whole environment, this process's own unless given."""
        start = Start(
            arguments=[*arguments],
            env=dict(os.environ if env is None else env),
            cwd=str(cwd or Path.cwd()),
            stdin=str(stdin or os.devnull),
            stdout=str(stdout),
            stderr=str(stderr),
            prepare=[*prepare],
        )
        return Forked(self, self._ask(start, int))

    def exit_code(self, pid: int) -> int | None:
        """The exit code of a process that has ended; None while it runs."""
        if pid not in self._exit_codes:
            self._exit_codes |= self._ask(Reap(), dict[int, int])
        return self._exit_codes.get(pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """Kill all that still run, and end the server. Exit codes stay known."""
        if self._process.poll() is None:
            self._exit_codes |= self._ask(Reap(kill=True), dict[int, int])
        with suppress(BrokenPipeError), self._process:  # closes the pipes and waits
            pass

    def _ask(self, question: Start | Reap, answer: type[T]) -> T:
        assert self._process.stdin
        with self._lock:
            self._asked += 1
            with suppress(BrokenPipeError), open(self._process.stdin.fileno(), "wb", closefd=False) as questions:
                questions.write(msgspec.json.encode(question) + b"\n")
            while (answered := self._next_answer(question)).number != self._asked:
                pass
        return msgspec.convert(answered.value, answer, strict=False)

    def _next_answer(self, question: Start | Reap) -> Answer:
        assert self._process.stdout
        readable, _, _ = select.select([self._process.stdout], [], [], _ANSWERED_S)
        assert readable, f"the fork server did not answer within {_ANSWERED_S:g} s to {question}"
        line = self._process.stdout.readline()
        assert line, f"the fork server ended with {self._process.wait()} when it was asked {question}"
        return msgspec.json.decode(line, type=Answer, strict=False)


@cache
def shared() -> ForkServer:
    """The one of this process, for all its tests; started at the first call."""
    server = ForkServer()
    atexit.register(server.close)
    return server


def main() -> None:
    """Serve until the input ends; in each forked process, run its command."""
    from tokenbus_services.cli.entry import main as command
    from tokenbus_services.cli.service_registry import SERVICES, app_module

    # The command imports its worker, a worker its service's app, and that of tools the MCP library when it has servers.
    services = (app_module(service) for service in SERVICES)
    commands = ("tokenbus_services.cli.main", "tokenbus_services.cli.worker")
    for module in (*commands, *services, "uvloop", "mcp", *sys.argv[1:]):
        importlib.import_module(module)
    assert threading.active_count() == 1, f"a fork would lose threads: {threading.enumerate()}"
    server = os.getpid()
    if start := _serve():
        _become(start, server)
        command(start.arguments)


def _serve() -> Start | None:
    """Returns in each forked process, with what it is to run; and None when the input has ended."""
    gc.collect()
    gc.freeze()  # what the processes share stays shared
    children: set[int] = set()
    with suppress(BrokenPipeError):  # the parent died while it waited for an answer
        for number, line in enumerate(iter(sys.stdin.buffer.readline, b""), 1):
            match msgspec.json.decode(line, type=Start | Reap):
                case Start() as start:
                    if not (pid := os.fork()):
                        return start
                    children.add(pid)
                    _answer(number, pid)
                case reap:
                    _answer(number, _reap(children, kill=reap.kill))
    _reap(children, kill=True)
    return None


def _answer(number: int, value: int | dict[int, int]) -> None:
    os.write(1, msgspec.json.encode(Answer(number, value)) + b"\n")


def _reap(children: set[int], *, kill: bool) -> dict[int, int]:
    if kill:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
    ended: dict[int, int] = {}
    for pid in [*children]:
        gone, status = os.waitpid(pid, 0 if kill else os.WNOHANG)
        if gone:
            children.discard(pid)
            ended[pid] = os.waitstatus_to_exitcode(status)
    return ended


def _become(start: Start, server: int) -> None:
    """In the child: what an interpreter that was just started would have."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:  # it died in between
            os._exit(1)
    # What started the tests may let them ignore Ctrl-C, and so would all that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed()
    os.environ.clear()
    os.environ.update(start.env)
    time.tzset()
    os.chdir(start.cwd)
    os.dup2(os.open(start.stdin, os.O_RDONLY), 0)
    for stream, path in ((1, start.stdout), (2, start.stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), stream)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    sys.argv = ["tokenbus", *start.arguments]
    if start.prepare:
        hook, *arguments = start.prepare
        module, _, function = hook.partition(":")
        getattr(importlib.import_module(module), function)(*arguments)


if __name__ == "__main__":
    main()
