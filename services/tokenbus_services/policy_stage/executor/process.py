"""The fork server for executors, and an executor as a process: `python -m … FD`.

A policy worker starts one such process from a clean interpreter. It imports the policies once, then only forks
executors, kills them and reaps them. So an executor starts in milliseconds, shares the imported modules, and never
inherits a lock or connection of the worker. The process lives as long as the worker's end of its socket, and its
executors no longer than it does.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import resource
import select
import signal
import socket
import struct
import sys
import traceback
from contextlib import suppress
from typing import Never

import msgspec

from tokenbus.bus.keys import Keys
from tokenbus.errors import SettingsError
from tokenbus_services.policy_stage.bus_client import PolicyClient
from tokenbus_services.policy_stage.executor import messages
from tokenbus_services.policy_stage.executor.calls import Links, PolicyExecutor, load_policies
from tokenbus_services.policy_stage.executor.marking import Marking
from tokenbus_services.policy_stage.executor.marks import MarksPage
from tokenbus_services.policy_stage.executor.messages import Setup
from tokenbus_services.runtime import logs

COMMAND = struct.Struct("<cQ")
"""Sent to the process: `FORK`, with the executor's socket and page, or `KILL` and the executor's id."""
FORK, KILL = b"F", b"K"
PID = struct.Struct("<Q")
"""The reply to `FORK`."""
LENGTH = struct.Struct("<I")
REAP_S = 0.2
CLOSE_S = 3.0
"""How long an executor may take to end running work."""
EXIT_DEFECT, EXIT_MEMORY = 1, 9
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main(fd: int) -> None:
    """Serve the worker at the other end of this socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker = socket.socket(fileno=fd)
    setup = msgspec.msgpack.decode(_receive(worker, LENGTH.unpack(_receive(worker, LENGTH.size))[0]), type=Setup)
    sys.path[:] = setup.path
    logs.configure(setup.log_level, service="policy", secrets=setup.secrets)
    try:
        links = load_policies(setup.policies)
    except SettingsError as e:
        _answer(worker, [e.source, e.where, e.problem])
        return
    _answer(worker, None)
    gc.collect()
    gc.freeze()
    _ForkServer(worker, setup, links).serve()


def _receive(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (more := sock.recv(size - len(data))):
            sys.exit()
        data += more
    return data


def _answer(sock: socket.socket, problem: list[str] | None) -> None:
    body = msgspec.msgpack.encode(problem)
    sock.sendall(LENGTH.pack(len(body)) + body)


class _ForkServer:
    def __init__(self, worker: socket.socket, setup: Setup, links: Links) -> None:
        self._worker = worker
        self._setup = setup
        self._links = links
        self._children: set[int] = set()

    def serve(self) -> None:
        """Serve the worker until its end of the socket closes."""
        try:
            while self._serve_one():
                self._reap()
        finally:
            for pid in self._children:
                os.kill(pid, signal.SIGKILL)

    def _serve_one(self) -> bool:
        if not select.select([self._worker], [], [], REAP_S)[0]:
            return True
        try:
            data, fds, _, _ = socket.recv_fds(self._worker, COMMAND.size, 2)
        except ConnectionError:
            return False
        if not data:
            return False
        command, pid = COMMAND.unpack(data)
        if command == FORK:
            self._fork(*fds)
        elif pid in self._children:  # not reaped yet, so its id cannot belong to another process
            os.kill(pid, signal.SIGKILL)
        return True

    def _fork(self, connection: int, page: int) -> None:
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._worker.close()
            _run_executor(server, connection, page, self._setup, self._links)
        os.close(connection)
        os.close(page)
        self._children.add(pid)
        self._worker.sendall(PID.pack(pid))

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                self._children.discard(pid)


def _run_executor(server: int, connection: int, page: int, setup: Setup, links: Links) -> Never:
    """Run an executor from its fork to its end."""
    try:
        _end_with(server)
        marking = Marking(MarksPage(page))
        _bound_memory(setup.memory_bytes)
        runner = asyncio.Runner()
        marking.install(runner.get_loop())
        runner.run(_serve(socket.socket(fileno=connection), setup, links, marking))
    except MemoryError:
        os._exit(EXIT_MEMORY)
    except BaseException:
        traceback.print_exc()
        os._exit(EXIT_DEFECT)
    os._exit(0)


async def _serve(connection: socket.socket, setup: Setup, links: Links, marking: Marking) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=connection)

    def out_of_memory() -> None:
        # Exit at once: the remaining memory may not suffice for anything else.
        marking.page.out_of_memory()
        os._exit(EXIT_MEMORY)

    executor = PolicyExecutor(
        links,
        PolicyClient(setup.redis_url, Keys(setup.prefix, setup.partitions), run_ttl_ms=setup.run_ttl_ms),
        timeouts={name: policy.timeout_s for name, policy in setup.policies.items()},
        calls=setup.calls,
        reassure_s=setup.reassure_s,
        send=lambda message: writer.write(messages.framed(message)),
        marking=marking,
        out_of_memory=out_of_memory,
    )
    frames = messages.Frames(messages.to_executor)
    with suppress(ConnectionError):
        while data := await reader.read(2**16):
            for message in frames.feed(data):
                executor.handle(message)
    # The worker no longer needs this executor, or is gone. Requests of policies on the bus are cancelled.
    with suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_S):
            await executor.close()


def _end_with(server: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(0)


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


if __name__ == "__main__":
    with suppress(ConnectionError):  # the worker was killed
        main(int(sys.argv[1]))
