"""The fork server, and an executor from its fork to its end.

A worker starts the fork server from a clean interpreter (`executor.__main__`). It imports the deployment's code once,
then only forks executors, kills them and reaps them. It lives as long as the worker's end of its socket, and its
executors no longer than it does.

Between the two stands a guard for each executor: the parent that work may kill, and to which processes come that the
work left behind in sessions of their own (on Linux). It ends them with its executor.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import io
import os
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any, Never, cast

import msgspec
import structlog

from tokenbus.errors import SettingsError
from tokenbus_services.executor.marks import Marking, MarksPage
from tokenbus_services.executor.protocol import COMMAND, FORK, FORK_FDS, Frames, Setup, framed
from tokenbus_services.runtime import logs

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

REAP_S = 0.2
EXIT_DEFECT, EXIT_MEMORY = 1, 9
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>


class Link:
    """An executor's connection to its worker."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, marking: Marking) -> None:
        self._reader = reader
        self._writer = writer
        self.marking = marking

    def send(self, message: msgspec.Struct) -> None:
        """Send a message. Does not wait."""
        self._writer.write(framed(message))

    async def received(self) -> AsyncIterator[bytes]:
        """Yield the worker's messages, until it no longer needs this executor or is gone."""
        frames = Frames()
        with suppress(ConnectionError):
            while data := await self._reader.read(2**16):
                for body in frames.feed(data):
                    yield body

    def out_of_memory(self) -> Never:
        """Exit at once: the remaining memory may not suffice for anything else."""
        self.marking.page.out_of_memory()
        os._exit(EXIT_MEMORY)


Serve = Callable[[Link], Coroutine[Any, Any, None]]
"""Runs in each executor, and returns when the link has ended."""


def main(prepare: Callable[[bytes], Serve], fd: int) -> None:
    """Serve the worker whose socket is ``fd``. ``prepare`` gets `Setup.work`, and imports the deployment's code; its
    SettingsError is the worker's.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Supervisors send it to all processes of a service. The worker gets it too, and lets running work end. Not ignored:
    # what work starts would ignore it as well.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    for stream in (sys.stdout, sys.stderr):  # lines appear as they are written, also if the executor is killed
        cast("io.TextIOWrapper", stream).reconfigure(line_buffering=True)
    with suppress(ConnectionError):  # the worker was killed
        worker = socket.socket(fileno=fd)
        setup = msgspec.msgpack.decode(_first_message(worker), type=Setup)
        sys.path[:] = setup.path
        logs.configure(setup.log_level, service=setup.service, secrets=setup.secrets)
        try:
            serve = prepare(setup.work)
        except SettingsError as e:
            worker.sendall(framed((e.source, e.where, e.problem)))
            return
        worker.sendall(framed(None))
        gc.collect()
        gc.freeze()
        _ForkServer(worker, setup, serve).run()


def _first_message(sock: socket.socket) -> bytes:
    frames = Frames()
    while data := sock.recv(2**16):
        for body in frames.feed(data):
            return body
    sys.exit()


class _ForkServer:
    def __init__(self, worker: socket.socket, setup: Setup, serve: Serve) -> None:
        self._worker = worker
        self._setup = setup
        self._serve = serve
        self._children: set[int] = set()
        """The guards."""
        self._of_code = _children()
        """Processes that the deployment's code started as it was imported."""

    def run(self) -> None:
        """Serve the worker until its end of the socket closes."""
        _adopt()
        try:
            while self._serve_one():
                self._reap()
        finally:
            for pid in self._children:
                _kill(pid)
            _end_adopted(self._of_code)

    def _serve_one(self) -> bool:
        if not select.select([self._worker], [], [], REAP_S)[0]:
            return True
        data, fds, _, _ = socket.recv_fds(self._worker, COMMAND.size, FORK_FDS)
        if not data:
            return False
        command, pid = COMMAND.unpack(data)
        if command == FORK:
            self._fork(fds)
        elif pid in self._children:  # not reaped yet, so its id cannot belong to another process
            _kill(pid)
        return True

    def _fork(self, fds: list[int]) -> None:
        server = os.getpid()
        try:
            if (pid := os.fork()) == 0:
                self._worker.close()
                _guard(server, fds, self._setup, self._serve)
            self._children.add(pid)
        except OSError as e:  # the worker sees the connection close
            log.error("executor_not_forked", problem=str(e))
        for fd in fds:
            os.close(fd)

    def _reap(self) -> None:
        """Reap the guards that ended, after killing what is left of their group, and what guards that were killed left
        behind.
        """
        with suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if ended.si_pid in self._children:
                    _kill(ended.si_pid)
                os.waitpid(ended.si_pid, 0)
                self._children.discard(ended.si_pid)
        for pid in _children() - self._children - self._of_code:
            _kill(pid)


def _kill(pid: int) -> None:
    """Kill the process and its group: a guard, its executor and the processes that it started."""
    for kill in (os.killpg, os.kill):  # the group may not exist yet
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _guard(server: int, fds: list[int], setup: Setup, serve: Serve) -> Never:
    try:
        os.setpgid(0, 0)
        _end_with(server)
        _adopt()
        guard = os.getpid()
        if (executor := os.fork()) == 0:
            _run_executor(guard, fds, setup, serve)
        for fd in fds:
            os.close(fd)
        while os.wait()[0] != executor:  # others were adopted
            pass
        _end_adopted(set())
    except BaseException:
        traceback.print_exc()
        os._exit(EXIT_DEFECT)
    os._exit(0)


def _run_executor(guard: int, fds: list[int], setup: Setup, serve: Serve) -> Never:
    try:
        connection, page, prints = fds
        _end_with(guard)
        for fd in (1, 2):
            os.dup2(prints, fd)
        os.close(prints)
        marking = Marking(MarksPage(page))
        _bound_memory(setup.memory_bytes)
        sock = socket.socket(fileno=connection)
        sock.sendall(framed((os.getpid(), guard)))
        runner = asyncio.Runner()
        marking.install(runner.get_loop())
        runner.run(_linked(sock, marking, serve))
    except MemoryError:
        os._exit(EXIT_MEMORY)
    except BaseException:
        traceback.print_exc()
        os._exit(EXIT_DEFECT)
    os._exit(0)


async def _linked(sock: socket.socket, marking: Marking, serve: Serve) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=sock)
    await serve(Link(reader, writer, marking))


def _end_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _adopt() -> None:
    """Become the parent of processes below this one whose parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _children() -> set[int]:
    """The children of this process; none where the system does not list them."""
    with suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as children:
        return {int(pid) for pid in children.read().split()}
    return set()


def _end_adopted(known: set[int]) -> None:
    """End all children but these, and theirs, which come to this process."""
    with suppress(ChildProcessError):
        while adopted := _children() - known:
            for pid in adopted:
                _kill(pid)
            for pid in adopted:
                os.waitpid(pid, 0)


def _bound_memory(memory_bytes: int) -> None:
    """Refuse memory beyond the limit, so that one step cannot use it all up before the worker checks."""
    if sys.platform != "linux":
        return
    with open("/proc/self/statm", encoding="ascii") as statm:
        data_bytes = int(statm.read().split()[5]) * resource.getpagesize()
    most = data_bytes + memory_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or most < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
