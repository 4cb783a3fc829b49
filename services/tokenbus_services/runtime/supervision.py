"""Ends a worker that cannot continue: one supervisor watches its long-lived tasks for exits and stalls.

Such a worker must stop claiming and renewing, or no other worker could take over. So from that moment it claims and
renews nothing, hands back what it holds, and exits with its own exit code, after logging which task failed and where it
was waiting. Its parent (`tokenbus up`, Compose, an orchestrator) restarts it.

A child process checks that the event loop turns. If it does not, leases and heartbeats stop by themselves; the child
ends the worker, so that a new one replaces it. A thread could not: it needs the interpreter's lock, which the code that
blocks the loop may hold.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import mmap
import os
import select
import signal
import struct
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Never, Self

import structlog

from tokenbus.bus import process_clock
from tokenbus.bus.liveness import STUCK_OF_MANY_NODES_S, STUCK_S, Liveness, LongTask, stop_task
from tokenbus.bus.server.server import parse_url
from tokenbus.errors import TokenbusError

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

EXIT_STUCK = 7
"""Exit code of a worker that could not continue."""
TICK_S = 0.25
HAND_OVER_S = 4.0
"""How long a failing worker may take to hand over its work; then the process is ended."""
BLOCKED_S = 30.0
"""An event loop that has not turned for this long, while its process ran, counts as dead."""
CHECK_S = 1.0
STACKS = signal.SIGXCPU
"""A worker that gets this signal writes the stack of each of its threads to its log."""
_STACKS_S = 1.0
"""How long that may take."""
_TURNS = struct.Struct("<Q")
_PR_SET_NAME = 15  # <linux/prctl.h>


class WorkerStuck(TokenbusError):
    """A required task of the worker ended or made no progress."""

    code = "worker_stuck"
    retryable = True
    exit_code = EXIT_STUCK

    def __init__(self, task: str, problem: str) -> None:
        super().__init__(f"the worker cannot continue: task {task!r} {problem}")
        self.task = task
        self.problem = problem


def stuck_after_s(redis_url: str) -> float:
    """How long a task may go without progress, given how long a command may take on this server."""
    return STUCK_S if parse_url(redis_url).topology == "single" else STUCK_OF_MANY_NODES_S


class WorkerSupervisor:
    """Watches one worker's tasks from `open` to `close`."""

    def __init__(self, liveness: Liveness, *, stuck_s: float) -> None:
        self._liveness = liveness
        self._stuck_s = stuck_s
        self._failed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self.error: WorkerStuck | None = None
        """Why the worker ends."""

    @property
    def is_healthy(self) -> bool:
        """Whether all required tasks are running."""
        return self.error is None and self._liveness.complete

    def open(self) -> None:
        """Start watching."""
        self._liveness.ended = self._ended
        self._task = asyncio.create_task(self._watch(), name="supervisor")
        self._task.add_done_callback(self._unwatched)

    def stopping(self) -> None:
        """The worker takes nothing new: from here on tasks end normally, but none may stand still."""
        self._liveness.close()

    async def close(self) -> None:
        """Stop watching."""
        self.stopping()
        await stop_task(self._task)

    def closed(self) -> None:
        """The service has closed; only the event loop still has to end."""
        self._closed = True

    def wait_or_fail(self, receive: Callable[[], Awaitable[Any]]) -> Callable[[], Awaitable[Any]]:
        """Wrap the lifespan's ASGI ``receive``: it also shuts the app down if the worker cannot continue."""

        async def receive_or_failed() -> Any:
            message, failed = asyncio.ensure_future(receive()), asyncio.ensure_future(self._failed.wait())
            try:
                await asyncio.wait({message, failed}, return_when=asyncio.FIRST_COMPLETED)
                return message.result() if message.done() else {"type": "lifespan.shutdown"}
            finally:
                message.cancel()
                failed.cancel()

        return receive_or_failed

    def _ended(self, long_task: LongTask) -> None:
        task = long_task.task
        error = None if task.cancelled() else task.exception()
        problem = f"raised {type(error).__name__}: {error}" if error else "ended"
        self._fail(long_task.name, "was cancelled" if task.cancelled() else problem, error)

    async def _watch(self) -> None:
        with process_clock.ticking():
            await self._watch_tasks()

    async def _watch_tasks(self) -> None:
        before = process_clock.now()
        while True:
            await asyncio.sleep(TICK_S)
            now = process_clock.now()
            self._liveness.elapsed_s += now - before
            before = now
            for long_task in self._liveness.tasks:
                if long_task.still_s > self._stuck_s + long_task.slack_s:
                    where = "".join(_waits_at(long_task.task))
                    self._fail(long_task.name, f"made no progress for {long_task.still_s:.1f} s", None, where)
                    long_task.task.cancel()  # it may hold what the others need to end
                    return

    def _unwatched(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            self._fail("supervisor", f"raised {type(error).__name__}: {error}", error)

    def _fail(self, name: str, problem: str, error: BaseException | None, where: str = "") -> None:
        if self.error is not None:
            return
        self.error = WorkerStuck(name, problem)
        self._liveness.failed = True
        self._liveness.close()
        log.critical("worker_exiting", task=name, problem=problem, waits_at=where or None, exc_info=error)
        self._failed.set()
        last = threading.Timer(HAND_OVER_S, self._end_now)
        last.daemon = True
        last.start()

    def _end_now(self) -> None:
        if not self._closed:
            log.critical("worker_exit_forced", task=self.error and self.error.task)
        os._exit(EXIT_STUCK)


class LoopWatch:
    """A child process that ends this one if its event loop no longer turns. Use as ``with LoopWatch() as watch``."""

    def __init__(self) -> None:
        """Start it, before the event loop and any thread runs."""
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        self._turns = 0
        faulthandler.register(STACKS, all_threads=True)
        # The handler gets the signal's number and makes it the exit code, without the interpreter.
        libc = ctypes.CDLL(None)
        libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
        libc.signal(EXIT_STUCK, ctypes.cast(libc._exit, ctypes.c_void_p))
        lives, self._life = os.pipe()  # our end closes with this process
        worker = os.getpid()
        self._child = os.fork()
        if self._child == 0:
            _watch_worker(worker, lives, self._page)
        os.close(lives)

    def follow(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch this event loop from now on."""
        self._turns += 1
        _TURNS.pack_into(self._page, 0, self._turns)
        loop.call_later(TICK_S, self.follow, loop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """End the child."""
        os.close(self._life)
        with suppress(ChildProcessError):
            os.waitpid(self._child, 0)


def _watch_worker(worker: int, lives: int, page: mmap.mmap) -> Never:
    """The child. Ends with its worker."""
    try:
        for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(ignored, signal.SIG_IGN)
        for fd in map(int, os.listdir("/dev/fd")):
            if fd not in (sys.stderr.fileno(), lives):
                with suppress(OSError):  # that of the list itself is closed already
                    os.close(fd)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_NAME, b"loop watch")
        seen, still_s, before = 0, 0.0, time.monotonic()
        while not select.select([lives], [], [], CHECK_S)[0]:
            now = time.monotonic()
            # Cap the step: if this process was stopped or had no CPU, its worker had none either.
            passed_s, before = min(now - before, 2 * CHECK_S), now
            (turns,) = _TURNS.unpack_from(page, 0)
            if turns != seen:
                seen, still_s = turns, 0.0
            elif turns and not _is_stopped(worker):
                still_s += passed_s
            if still_s > BLOCKED_S and os.getppid() == worker:
                log.critical("event_loop_blocked", pid=worker, seconds=round(still_s))
                for number in (STACKS, EXIT_STUCK, signal.SIGKILL):
                    os.kill(worker, number)
                    select.select([lives], [], [], _STACKS_S)
    finally:
        os._exit(0)


def _is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped the process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def _waits_at(task: asyncio.Task[Any]) -> list[str]:
    """Return where the task is waiting, innermost call last."""
    found: list[str] = []
    waits_in: Any = task.get_coro()
    while waits_in is not None:
        if frame := getattr(waits_in, "cr_frame", None) or getattr(waits_in, "ag_frame", None):
            found.append(f"{frame.f_code.co_qualname}:{frame.f_lineno} ")
        waits_in = getattr(waits_in, "cr_await", None) or getattr(waits_in, "ag_await", None)
    return found
