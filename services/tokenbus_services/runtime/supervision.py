"""A worker works or goes: one supervisor watches its long-lived tasks, and ends it when one ended or stands still.

A worker that cannot go on must not go on claiming and renewing, or nobody would take over. So it claims and renews
nothing more from that moment, hands back what it holds, and exits with a code of its own, after a line that says which
task it was and where that waited. Whoever started it (`tokenbus up`, Compose, an orchestrator) starts it again.

A thread looks whether the event loop turns at all. Where it does not, leases and heartbeats stop by themselves; the
thread ends the process, so that a new one takes its place.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

from tokenbus.bus.liveness import STUCK_OF_MANY_NODES_S, STUCK_S, Liveness, LongTask
from tokenbus.bus.server.server import parse_url
from tokenbus.errors import TokenbusError

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

EXIT_STUCK = 7
"""The exit code of a worker that could not go on."""
TICK_S = 0.25
HAND_OVER_S = 4.0
"""How long a worker that goes may take to hand back what it holds. Then it ends as it is."""
BLOCKED_S = 30.0
"""An event loop that did not turn for so long does not turn again."""
LOOK_S = 1.0


class WorkerStuck(TokenbusError):
    """A task that the worker cannot do without ended, or made no progress."""

    code = "worker_stuck"
    retryable = True
    exit_code = EXIT_STUCK

    def __init__(self, task: str, problem: str) -> None:
        super().__init__(f"the worker cannot go on: task {task!r} {problem}")
        self.task = task
        self.problem = problem


def stuck_after_s(redis_url: str) -> float:
    """How long a task may make no progress, by what one command may take at this server."""
    return STUCK_S if parse_url(redis_url).topology == "single" else STUCK_OF_MANY_NODES_S


class WorkerSupervisor:
    """Watches one worker's tasks from `open` to `close`."""

    def __init__(self, liveness: Liveness, *, stuck_s: float) -> None:
        self._liveness = liveness
        self._stuck_s = stuck_s
        self._failed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._turns = 0
        """How often the event loop came by."""
        self._closed = threading.Event()
        self.error: WorkerStuck | None = None
        """Why the worker goes."""

    @property
    def is_healthy(self) -> bool:
        """Whether all tasks run that the worker lives by."""
        return self.error is None and self._liveness.complete

    def open(self) -> None:
        """Begin to watch."""
        self._liveness.ended = self._ended
        self._task = asyncio.create_task(self._watch(), name="supervisor")
        self._task.add_done_callback(self._unwatched)
        threading.Thread(target=self._watch_loop, name="event loop's watch", daemon=True).start()

    async def close(self) -> None:
        """Watch no more: from here on tasks end as they should."""
        self._liveness.close()
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def closed(self) -> None:
        """The service has ended; only the event loop is left to end."""
        self._closed.set()

    def wait_or_fail(self, receive: Callable[[], Awaitable[Any]]) -> Callable[[], Awaitable[Any]]:
        """ASGI's ``receive`` of the lifespan, which also tells the app to stop where the worker cannot go on."""

        async def receive_or_failed() -> Any:
            told, failed = asyncio.ensure_future(receive()), asyncio.ensure_future(self._failed.wait())
            try:
                await asyncio.wait({told, failed}, return_when=asyncio.FIRST_COMPLETED)
                return told.result() if told.done() else {"type": "lifespan.shutdown"}
            finally:
                told.cancel()
                failed.cancel()

        return receive_or_failed

    def _ended(self, long_task: LongTask) -> None:
        task = long_task.task
        error = None if task.cancelled() else task.exception()
        problem = f"raised {type(error).__name__}: {error}" if error else "ended"
        self._fail(long_task.name, "was cancelled" if task.cancelled() else problem, error)

    async def _watch(self) -> None:
        clock = asyncio.get_running_loop().time
        before = clock()
        while True:
            await asyncio.sleep(TICK_S)
            now = clock()
            # A process that was stopped, or had no processor, is not one whose tasks stand still.
            self._liveness.elapsed_s += min(now - before, 2 * TICK_S)
            before = now
            self._turns += 1
            for long_task in self._liveness.tasks:
                if long_task.still_s > self._stuck_s + long_task.slack_s:
                    where = "".join(_waits_at(long_task.task))
                    self._fail(long_task.name, f"made no progress for {long_task.still_s:.1f} s", None, where)
                    long_task.task.cancel()  # it may hold what the rest needs to end
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
        log.critical("worker_goes", task=name, problem=problem, waits_at=where or None, exc_info=error)
        self._failed.set()
        last = threading.Timer(HAND_OVER_S, self._end_now)
        last.daemon = True
        last.start()

    def _end_now(self) -> None:
        if not self._closed.is_set():
            log.critical("worker_ended_as_it_was", task=self.error and self.error.task)
        os._exit(EXIT_STUCK)

    def _watch_loop(self) -> None:
        seen, still_s, before = -1, 0.0, time.monotonic()
        while not self._closed.wait(LOOK_S):
            now = time.monotonic()
            still_s += min(now - before, 2 * LOOK_S)
            before = now
            if self._turns != seen or (self._task and self._task.done()):
                seen, still_s = self._turns, 0.0
            elif still_s > BLOCKED_S:
                log.critical("event_loop_blocked", seconds=round(still_s))
                faulthandler.dump_traceback(sys.stderr, all_threads=True)
                os._exit(EXIT_STUCK)


def _waits_at(task: asyncio.Task[Any]) -> list[str]:
    """Where the task waits, the innermost call last."""
    found: list[str] = []
    waits_in: Any = task.get_coro()
    while waits_in is not None:
        if frame := getattr(waits_in, "cr_frame", None) or getattr(waits_in, "ag_frame", None):
            found.append(f"{frame.f_code.co_qualname}:{frame.f_lineno} ")
        waits_in = getattr(waits_in, "cr_await", None) or getattr(waits_in, "ag_await", None)
    return found
