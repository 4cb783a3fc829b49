"""Ends a worker that cannot continue: one supervisor watches its long-lived tasks for exits and stalls.

Such a worker must stop claiming and renewing, or no other worker could take over. So from that moment it claims and
renews nothing, hands back what it holds, and exits with its own exit code, after logging which task failed and where it
was waiting. Its parent (`tokenbus up`, Compose, an orchestrator) restarts it.

A child process checks that the event loop turns. If it does not, leases and heartbeats stop by themselves; the child
ends the worker, so that a new one replaces it. A thread could not: it needs the interpreter's lock, which the code that
blocks the loop may hold.

A worker that runs embedded in another program (`tokenbus.testing.LocalBus`) never ends that program's process. If a
task of it ends, its app shuts down and raises `WorkerStuck`. A stall is only logged: no other worker could take over,
and the program itself may have held the interpreter.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import json
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from tempfile import TemporaryFile
from typing import Any, Self

import structlog

from tokenbus.bus import process_clock
from tokenbus.bus.liveness import STUCK_OF_MANY_NODES_S, STUCK_S, Liveness, LongTask, stop_task
from tokenbus.bus.server.server import parse_url
from tokenbus.errors import TokenbusError
from tokenbus_services.process import loop_watch
from tokenbus_services.process.loop_watch import EXIT_STUCK

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

TICK_S = 0.25
HAND_OVER_S = 4.0
"""How long a failing worker may take to hand over its work; then the process is ended."""
BLOCKED_S = 30.0
"""An event loop that has not turned for this long, while its process ran, counts as dead."""


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
        self.embedded = False
        """Whether the process belongs to another program, which this must not end."""
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
        logged: set[LongTask] = set()
        while True:
            await asyncio.sleep(TICK_S)
            now = process_clock.now()
            self._liveness.elapsed_s += now - before
            before = now
            still = {task for task in self._liveness.tasks if task.still_s > self._stuck_s + task.slack_s}
            for long_task in still - logged:
                problem, where = f"made no progress for {long_task.still_s:.1f} s", "".join(_waits_at(long_task.task))
                if self.embedded:
                    log.warning("task_stalled", task=long_task.name, problem=problem, waits_at=where)
                    continue
                self._fail(long_task.name, problem, None, where)
                long_task.task.cancel()  # it may hold what the others need to end
                return
            logged = still

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
        if self.embedded:
            return
        last = threading.Timer(HAND_OVER_S, self._end_now)
        last.daemon = True
        last.start()

    def _end_now(self) -> None:
        if not self._closed:
            log.critical("worker_exit_forced", task=self.error and self.error.task)
        os._exit(EXIT_STUCK)


class LoopWatch:
    """A child process that ends this one if its event loop no longer turns: `process.loop_watch`. Use as ``with
    LoopWatch() as watch``.
    """

    def __init__(self) -> None:
        """Start it, before the event loop and any thread runs."""
        self._turns = 0
        faulthandler.register(loop_watch.STACKS, all_threads=True)
        # The handler gets the signal's number and makes it the exit code, without the interpreter.
        libc = ctypes.CDLL(None)
        libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
        libc.signal(EXIT_STUCK, ctypes.cast(libc._exit, ctypes.c_void_p))
        fields = json.dumps(structlog.contextvars.get_contextvars(), default=str)[1:-1]
        page = _shared_file()
        try:
            os.truncate(page, mmap.PAGESIZE)
            self._page = mmap.mmap(page, mmap.PAGESIZE)
            self._child = subprocess.Popen(
                [sys.executable, "-I", "-S", loop_watch.__file__, str(page), str(BLOCKED_S), fields],
                pass_fds=[page],
                stdin=subprocess.PIPE,  # our end closes with this process
                stdout=subprocess.DEVNULL,
            )
        finally:
            os.close(page)

    def follow(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch this event loop from now on."""
        self._turns += 1
        loop_watch.TURNS.pack_into(self._page, 0, self._turns)
        loop.call_later(TICK_S, self.follow, loop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """End the child."""
        assert self._child.stdin
        self._child.stdin.close()
        self._child.wait()


def _shared_file() -> int:
    """A descriptor of a file without a name."""
    if sys.platform == "linux":  # its file system may be read-only
        return os.memfd_create("turns")
    with TemporaryFile() as file:
        return os.dup(file.fileno())


def _waits_at(task: asyncio.Task[Any]) -> list[str]:
    """Return where the task is waiting, innermost call last."""
    found: list[str] = []
    waits_in: Any = task.get_coro()
    while waits_in is not None:
        if frame := getattr(waits_in, "cr_frame", None) or getattr(waits_in, "ag_frame", None):
            found.append(f"{frame.f_code.co_qualname}:{frame.f_lineno} ")
        waits_in = getattr(waits_in, "cr_await", None) or getattr(waits_in, "ag_await", None)
    return found
