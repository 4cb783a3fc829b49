"""A process that has imported the services once, and forks one that runs a `tokenbus` command whenever it is asked.

A start costs hundredths of a second in place of a second of imports. What is forked is a process like any other: it has
an environment, a working directory, output files, signal handlers and a session of its own, inherits no open file, and
ends as an interpreter does. Two things it shares with the others of its server: the seed of string hashes, and what was
imported. Where that matters, and for variables that an interpreter reads at its start (PYTHONPATH), a test takes a true
process.

The server is single-threaded and knows no event loop: it answers each JSON line on its standard input by one on its
standard output, and by the number of that line: who asked may have been interrupted before it read its answer. When the
input ends, however its parent ended, all that it forked is killed.
``python -m tests.fork_server [MODULE…]``; the modules are imported before the first fork, too. With ``--listen=FD`` it
forks a server for each connection: so the processes of one run of the suite import the services once (`template`).
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
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self, TypeVar

import msgspec

from tests.waiting import eventually

ROOT = Path(__file__).parents[1]
_ANSWERED_S = 120.0
"""Longest wait for an answer of the server: the first one waits for its imports, on a machine that may be loaded."""
_ENDED_S = 60.0
_LISTEN = "--listen="
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
T = TypeVar("T")

APART: dict[int, int] = {}
"""By id the servers of this process that are no children of it: what they took of the processors, 0 while they live."""


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

    def __init__(self, *preload: str, at: str = "") -> None:
        """``preload``: modules to import beside the services'. ``at``: the address of a `template` that forks it; what
        it starts imports them then.
        """
        self._exit_codes: dict[int, int] = {}
        self._asked = 0
        self._lock = threading.Lock()
        if at:
            with socket.socket(socket.AF_UNIX) as channel:
                channel.connect(at)
                self._input = self._output = self._channel = channel.makefile("rwb", buffering=0)
            self.pid = msgspec.convert(self._next_answer(at).value, int)
            APART[self.pid] = 0
            return
        self._channel = subprocess.Popen(
            [sys.executable, "-m", "tests.fork_server", *preload],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # an answer in a buffer would not be seen by select()
            start_new_session=True,  # a Ctrl-C is for the tests, which end what they started
        )
        assert self._channel.stdin
        assert self._channel.stdout
        self._input, self._output = self._channel.stdin, self._channel.stdout
        self.pid = self._channel.pid

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

    def close(self) -> None:
        """Kill all that still run, and end the server. Exit codes stay known."""
        if not isinstance(self._channel, subprocess.Popen) or self._channel.poll() is None:
            self._exit_codes |= self._ask(Reap(kill=True), dict[int, int])
        if self.pid in APART:
            APART[self.pid] = ticks_of(Path("/proc", str(self.pid)))
        with suppress(BrokenPipeError), self._channel:  # closes the pipes, and waits for a process
            pass

    def _ask(self, question: Start | Reap, answer: type[T]) -> T:
        with self._lock:
            self._asked += 1
            with suppress(BrokenPipeError), open(self._input.fileno(), "wb", closefd=False) as questions:
                questions.write(msgspec.json.encode(question) + b"\n")
            while (answered := self._next_answer(question)).number != self._asked:
                pass
        return msgspec.convert(answered.value, answer, strict=False)

    def _next_answer(self, question: Start | Reap | str) -> Answer:
        readable, _, _ = select.select([self._output], [], [], _ANSWERED_S)
        assert readable, f"the fork server did not answer within {_ANSWERED_S:g} s to {question}"
        line = self._output.readline()
        code = self._channel.wait() if not line and isinstance(self._channel, subprocess.Popen) else None
        assert line, f"the fork server ended with {code} when it was asked {question}"
        return msgspec.json.decode(line, type=Answer, strict=False)


def ticks_of(process: Path) -> int:
    """What a process, by its folder in /proc, and its children that ended took of the processors. Raises OSError."""
    return sum(map(int, (process / "stat").read_text().rpartition(")")[2].split()[11:15]))


def new_server(*preload: str) -> ForkServer:
    """A server, forked by the `template` of this run of the suite if it has one."""
    return ForkServer(*preload, at=os.environ.get("TESTS_FORK_SERVER", ""))


@cache
def shared() -> ForkServer:
    """The one of this process, for all its tests; started at the first call."""
    server = new_server()
    atexit.register(server.close)
    return server


@contextmanager
def template() -> Generator[str]:
    """Run a process that forks a server for each that connects. Yields its address, for TESTS_FORK_SERVER."""
    with TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address := f"{directory}/socket")
        listener.listen(socket.SOMAXCONN)
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.fork_server", f"{_LISTEN}{listener.fileno()}"],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
        try:
            yield address
        finally:
            process.kill()
            process.wait()


def main() -> None:
    """Serve until the input ends; in each forked process, run its command."""
    from tokenbus_services import import_lightly
    from tokenbus_services.cli.entry import main as command
    from tokenbus_services.cli.service_registry import SERVICES, app_module
    from tokenbus_services.settings import Settings

    # The command imports its worker, a worker its service's app, and that of tools the MCP library when it has servers.
    import_lightly()
    services = (app_module(service) for service in SERVICES)
    commands = ("tokenbus_services.cli.main", "tokenbus_services.cli.worker")
    listener = next((word for word in sys.argv if word.startswith(_LISTEN)), "")
    at_start = ("uvloop", "anyio._backends._asyncio", "mcp", "tomllib", "uvicorn.lifespan.off")
    for module in (*commands, *services, *at_start, *(word for word in sys.argv[1:] if word != listener)):
        importlib.import_module(module)
    msgspec.convert({}, Settings)  # reads the annotations of all tables, once
    assert threading.active_count() == 1, f"a fork would lose threads: {threading.enumerate()}"
    if listener:
        _accept(socket.socket(fileno=int(listener.removeprefix(_LISTEN))))
    server = os.getpid()
    if start := _serve():
        _become(start, server)
        _end(command, start.arguments)


def _accept(listener: socket.socket) -> None:
    """Returns in each forked server, whose input and output are its connection. Its id is the first answer."""
    _end_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a server ended
    gc.collect()
    gc.freeze()
    while True:
        connection, _ = listener.accept()
        if not os.fork():
            break
        connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    listener.close()
    for descriptor in (0, 1):
        os.dup2(connection.fileno(), descriptor)
    connection.close()
    _answer(0, os.getpid())


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
    if _end_with_parent() and os.getppid() != server:  # it died in between
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


def _end(command: Callable[[Sequence[str]], None], arguments: Sequence[str]) -> None:
    """Run the command, and end as an interpreter does, but for the destruction of all modules: for that a fork would
    copy every page that it shares, which takes longer than its start.
    """
    code = None
    try:
        command(arguments)
    except SystemExit as e:
        if not isinstance(e.code, int | None):
            raise
        code = e.code
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]  # waits for those that are no daemons
    atexit._run_exitfuncs()
    gc.collect()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def _end_with_parent() -> bool:
    """Whether the kernel ends this process with its parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return sys.platform == "linux"


if __name__ == "__main__":
    main()
