"""The worker's side of executors: forks, watches and kills them."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import sys
import time
from abc import ABC, abstractmethod
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Literal, TypeVar, cast

import msgspec
import structlog

from tokenbus.bus.liveness import MAX_DEFECTS, Liveness, rest, stop_task
from tokenbus.errors import SettingsError
from tokenbus_services.executor.marks import ExecutorMarks, MarksPage
from tokenbus_services.executor.protocol import COMMAND, FORK, KILL, Frames, Setup, TooLong, framed

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

CHECK_S = 0.1
FORK_S = 20.0
"""A fork takes milliseconds, and longer on a machine without CPU. Ending the fork server ends all executors."""
DEAD_S = 0.5
"""How long the connection of an executor whose process is gone may stay open: until everything sent is read."""
CLOSE_S = 4.0
END_S = 2.0
FORK_WORK = "fork of an executor"

End = Literal["blocked", "stalled", "exited", "memory", "overran"]
"""How an executor ended: a call did not return within its timeout; a call held up other runs; the process died; it used
too much memory; a call ran past its timeout although it was cancelled.
"""


class NoExecutor(Exception):
    """No executor can be started on this host."""


class ExecutorProcess(asyncio.Protocol, ABC):
    """One executor; a room says what it does with messages and ends. Fork it with `Executors.fork`."""

    def __init__(self, *, message_bytes: int) -> None:
        """``message_bytes``: the longest message from it."""
        self.name = ""
        """Of what runs in it, for the log of what it prints."""
        self.page: MarksPage
        """Made when it is forked, with its pipe."""
        self.pid = self.guard = 0
        self.base_bytes = self.base_data_bytes = 0
        """Its memory at startup, resident and allocated."""
        self.forked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when it serves, with an error if it never does."""
        self.forked.add_done_callback(lambda forked: forked.cancelled() or forked.exception())
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when its end has been reported."""
        self.killed_for: End | None = None
        self.retired = False
        """Whether it gets no further work, and its end is expected."""
        self.lost = False
        """Whether its fork server failed, and all executors with it."""
        self.dead_s = 0.0
        """How long its process has been gone while its connection is open."""
        self.prints = -1
        """Its pipe."""
        self.on_gone: Callable[[ExecutorProcess], None] = lambda process: None
        self._transport: asyncio.Transport | None = None
        self._frames = Frames(message_bytes)

    @abstractmethod
    def on_message(self, body: bytes) -> None:
        """Handle a message. May raise DecodeError: then the executor ends."""

    @abstractmethod
    def on_end(self, end: End | None, marks: ExecutorMarks) -> None:
        """Handle its end. None: it was expected, or all executors ended."""

    def check(self, passed_s: float) -> End | None:
        """Return why it must be killed now. ``passed_s``: time since the last look, in which it could progress."""
        return None

    def send(self, message: msgspec.Struct) -> None:
        """Send a message, unless it is gone or retired."""
        if self._transport and not self.retired and not self._transport.is_closing():
            self._transport.write(framed(message))

    def retire(self) -> None:
        """Request that it finishes running work and exits."""
        self.retired = True
        if self._transport and not self._transport.is_closing():
            self._transport.write_eof()

    def cut_off(self) -> None:
        """Close the connection: the process is gone, but one that it left behind may hold the other end."""
        if self._transport:
            self._transport.abort()

    @property
    def data_bytes(self) -> int:
        """Memory allocated since its startup."""
        return _statm(self.pid, 5) - self.base_data_bytes

    @property
    def used_bytes(self) -> int:
        """Resident memory since its startup."""
        return _statm(self.pid, 1) - self.base_bytes

    @property
    def has_left_processes(self) -> bool:
        """Whether its work started processes that still run."""
        return _children(self.pid) > 0 or _children(self.guard) > 1

    # --- asyncio.Protocol -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports are not a subclass

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                if self.pid:
                    self.on_message(body)
                else:
                    self.pid, self.guard = msgspec.msgpack.decode(body, type=tuple[int, int])
                    self.base_bytes, self.base_data_bytes = _statm(self.pid, 1), _statm(self.pid, 5)
                    if not self.forked.done():
                        self.forked.set_result(None)
        except (msgspec.DecodeError, TooLong) as e:  # its work wrote to the executor's connection
            log.warning("executor_unreadable", pid=self.pid, problem=str(e))
            self.cut_off()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.forked.done():
            self.forked.set_exception(ConnectionError("it ended as it started"))
        self.on_gone(self)
        self.gone.set_result(None)


P = TypeVar("P", bound=ExecutorProcess)


class Executors:
    """A worker's fork server and its executors. Call `start`, then `stop`."""

    def __init__(self, module: str, setup: Setup, *, on_look: Callable[[], None] = lambda: None) -> None:
        """``module``: what the fork server runs (`fork_server.main`). ``on_look``: called at each look at them."""
        self._module = module
        self._setup = setup
        self._on_look = on_look
        self._server: _ForkServer | None = None
        self._replacing = asyncio.Lock()
        self._prints = Prints()
        self._failed_forks = 0
        self._failed_work: Callable[[str], object] = lambda work: None
        self._watching: asyncio.Task[None] | None = None
        self.processes: set[ExecutorProcess] = set()
        self.closed = False

    async def start(self, liveness: Liveness) -> None:
        """Start the fork server. Raises SettingsError if it cannot load the deployment's code; OSError."""
        self._failed_work = liveness.failed_work
        self._server = _ForkServer()
        await self._server.open(self._module, self._setup)
        self._watching = liveness.start(self._watch(), name="executors")

    async def stop(self) -> None:
        """Let running work end for a moment, then end all."""
        self.closed = True
        await stop_task(self._watching)
        running = [*self.processes]
        for each in running:
            each.retire()
        if running:
            await asyncio.wait([each.gone for each in running], timeout=CLOSE_S)
        if self._server:
            await self._server.close()
        for each in running:
            each.cut_off()
        if running:
            await asyncio.wait([each.gone for each in running])

    async def fork(self, process: P) -> P:
        """Start this executor and return it. Raises OSError. If cancelled, it ends."""
        try:
            await self._fork(process)
        except OSError as e:  # TimeoutError is one
            log.warning("executor_not_started", problem=str(e) or "no answer in time")
            self._failed_work(FORK_WORK)
            self._failed_forks += 1
            raise
        self._failed_forks = 0
        return process

    async def _fork(self, process: ExecutorProcess) -> None:
        if (server := self._server) is None or self.closed:
            raise ConnectionError("there is no fork server")
        if server.is_gone:
            server = await self._replace(server)
        with ExitStack() as undo:  # closes what was opened, if the process may open no more files
            ours, its = (undo.enter_context(end) for end in socket.socketpair())
            process.prints, written = os.pipe()
            for fd in (process.prints, written):
                undo.callback(os.close, fd)
            process.page = MarksPage()
            undo.pop_all()
        os.set_blocking(process.prints, False)
        process.on_gone = self._ended
        self.processes.add(process)
        # Not cancelled: else nobody would know who closes its files. Without a process, the connection ends by itself.
        connecting = asyncio.ensure_future(
            asyncio.get_running_loop().create_unix_connection(lambda: process, sock=ours)
        )
        try:
            try:
                await asyncio.shield(connecting)
                server.fork(its.fileno(), process.page.fd, written)
            finally:
                its.close()
                os.close(written)
            async with asyncio.timeout(FORK_S):
                await process.forked
        except BaseException as e:
            process.retired = True
            process.cut_off()
            if isinstance(e, TimeoutError):
                await self._replace(server)
            raise

    def kill(self, process: ExecutorProcess, end: End) -> None:
        """Kill it. Does nothing if it is gone."""
        process.killed_for = process.killed_for or end
        if self._server:
            self._server.kill(process.guard)

    async def _replace(self, failed: _ForkServer) -> _ForkServer:
        """Return a new fork server instead of this one. All executors end with that. Raises SettingsError, OSError."""
        async with self._replacing:
            if self._server and self._server is not failed:
                return self._server  # another fork did it
            for each in self.processes:
                each.lost = True
            gone = failed.is_gone
            status = await failed.close()
            log.warning("fork_server_replaced", ended_by_itself=gone, status=status)
            server = _ForkServer()
            await server.open(self._module, self._setup)
            self._server = server
            if self.closed:
                await server.close()
            return server

    async def _watch(self) -> None:
        before = time.monotonic()
        while True:
            await rest(CHECK_S)
            now = time.monotonic()
            # Cap the step: a worker that was stopped or had no CPU did not see whether its executors progressed.
            passed_s, before = min(now - before, 2 * CHECK_S), now
            for process in [each for each in self.processes if each.pid]:
                self._look_at(process, passed_s)
            self._on_look()
            if self._failed_forks >= MAX_DEFECTS:  # another host may be able to
                raise NoExecutor(f"{self._failed_forks} in a row could not be started")

    def _look_at(self, process: ExecutorProcess, passed_s: float) -> None:
        self.drain(process)
        if _is_gone(process.pid):
            process.dead_s += passed_s
            if process.dead_s > DEAD_S:
                process.cut_off()
        elif end := process.check(passed_s):
            self.kill(process, end)
        elif process.used_bytes > self._setup.memory_bytes:
            self.kill(process, "memory")

    def drain(self, process: ExecutorProcess) -> None:
        """Log what it printed until now."""
        self._prints.drain(process.prints, process.name, process.pid)

    def _ended(self, process: ExecutorProcess) -> None:
        self.processes.discard(process)
        self.drain(process)
        marks = process.page.read()
        process.page.close()
        os.close(process.prints)
        if self._server:
            self._server.kill(process.guard)  # it may only have closed its connection
        server_lost = process.lost or (self._server and self._server.is_gone)
        expected = self.closed or process.retired or server_lost
        end: End = "memory" if marks.out_of_memory else process.killed_for or "exited"
        process.on_end(None if expected else end, marks)


class _ForkServer:
    """The worker's end of a fork server. Call `open`, then `close`; after an error open a new one."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._sock: socket.socket | None = None

    async def open(self, module: str, setup: Setup) -> None:
        """Start it and wait until it has loaded the deployment's code. Raises SettingsError, OSError."""
        ours, its = socket.socketpair()
        ours.setblocking(False)
        self._sock = ours
        with its:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tokenbus_services.executor", module, str(its.fileno())),
                pass_fds=[its.fileno()],
                stdin=DEVNULL,
                stdout=sys.stderr,  # output printed at import must not mix with the worker's stdout
            )
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(ours, framed(setup))
        frames = Frames()
        while data := await loop.sock_recv(ours, 2**16):
            for body in frames.feed(data):
                if problem := msgspec.msgpack.decode(body, type=tuple[str, str, str] | None):
                    raise SettingsError(*problem)
                return
        raise ConnectionError("the process from which executors are forked ended as it started")

    @property
    def is_gone(self) -> bool:
        """Whether it has ended, and all executors with it. Its socket says that too late: an executor that it was just
        forking has it too.
        """
        if self._sock is None or self._process is None or self._process.returncode is not None:
            return True
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def fork(self, connection: int, page: int, prints: int) -> None:
        """Fork an executor, which gets these. Raises OSError."""
        if self._sock is None:
            raise ConnectionError("the fork server is closed")
        socket.send_fds(self._sock, [COMMAND.pack(FORK, 0)], [connection, page, prints])

    def kill(self, guard: int) -> None:
        """Kill the executor of this guard and the processes that it started. Does nothing if it is gone."""
        if self._sock:
            with suppress(OSError):
                self._sock.send(COMMAND.pack(KILL, guard))

    async def close(self) -> int | None:
        """Stop it, and all executors with it. Returns its exit status; None if it was never started."""
        if self._sock:
            self._sock.close()
            self._sock = None
        if self._process:
            try:
                async with asyncio.timeout(END_S):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        return self._process.returncode if self._process else None


def _is_gone(pid: int) -> bool:
    """Whether no process has this id any more."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # it runs as another user
        pass
    return False


def _children(pid: int) -> int:
    """How many processes threads of this one have started; 0 if it is gone or the system does not list them."""
    count = 0
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as children:
                count += len(children.read().split())
    return count


def _statm(pid: int, column: int) -> int:
    """Bytes in this column of the process's statm (proc(5)); 0 if it is gone or the system does not report it."""
    if sys.platform != "linux":
        return 0
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as statm:
            return int(statm.read().split()[column]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


LINE_CHARS = 1000
BURST_CHARS = 8192
"""How much of one name is logged at once; then `CHARS_PER_S`."""
CHARS_PER_S = 1024
_READ_BYTES = 2**16
_READS = 4
"""Reads of a pipe in one look. What prints faster is slowed down."""
_NAMES = 1000


class Prints:
    """The log of all executors of a worker."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[float, float]] = {}
        """By name: how many characters may be logged, and since when."""
        self._dropped: dict[str, int] = {}
        """By name: characters that were not logged since the last line that was."""

    def drain(self, fd: int, name: str, pid: int) -> None:
        """Read what was printed to this pipe."""
        for _ in range(_READS):
            try:
                data = os.read(fd, _READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                return
            self._log(data, name, pid)

    def _log(self, data: bytes, name: str, pid: int) -> None:
        now = time.monotonic()
        left, since = self._left.pop(name, (float(BURST_CHARS), now))
        left = min(left + (now - since) * CHARS_PER_S, BURST_CHARS)
        taken = data[: int(left)]
        for line in taken.decode(errors="replace").splitlines():
            if not line.strip():
                continue
            if dropped := self._dropped.pop(name, 0):
                log.warning("prints_dropped", of=name, bytes=dropped)
            log.info("printed", of=name, pid=pid, text=line[:LINE_CHARS])
        self._left[name] = left - len(taken), now
        if len(data) > len(taken):
            self._dropped[name] = self._dropped.get(name, 0) + len(data) - len(taken)
        if len(self._left) > _NAMES:
            del self._left[next(iter(self._left))]
