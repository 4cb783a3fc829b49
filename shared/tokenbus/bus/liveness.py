"""The long-lived tasks of one worker: which there are, and when each last made progress.

A worker whose task ended, or waits for what never comes, must not go on claiming and renewing: nobody would take over
what it does not do. So each loop that a worker lives by is started here, and says `beat` at every turn, idle or not: no
loop waits longer than `IDLE_S` without looking again. Whoever watches (in a worker the supervisor of
`tokenbus_services.runtime`) learns of a task that ended and of one that stands still; without a watcher nothing is ever
overdue, and these are plain tasks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from redis.exceptions import RedisError

T = TypeVar("T")

IDLE_S = 1.0
"""Longest wait of a loop between two beats while it has nothing to do."""
STUCK_S = 6.0
"""A task without a beat for so long is stuck. A command takes 5 s at the most (`REPLY_TIMEOUT_S`), each is a beat."""
MAX_DEFECTS = 10
"""A loop that failed so often in a row, without a turn that went well, will fail again."""
STUCK_OF_MANY_NODES_S = 15.0
"""The same where a command may have to ask several nodes who has the key (Sentinel, Cluster)."""


class LongTask:
    """One long-lived task."""

    def __init__(self, liveness: Liveness, name: str, task: asyncio.Task[Any]) -> None:
        self.name = name
        self.task = task
        self.slack_s = 0.0
        """What the step that it is at may take beside what any may."""
        self._liveness = liveness
        self._beaten_at = liveness.elapsed_s

    def beat(self) -> None:
        """It made progress."""
        self._beaten_at = self._liveness.elapsed_s

    @property
    def still_s(self) -> float:
        """Seconds since its last beat, of those in which the event loop turned."""
        return self._liveness.elapsed_s - self._beaten_at


class Defects:
    """Of one loop: turns in a row that failed, and not because of the server.

    A loop that only fails does no work, however often it turns.
    """

    def __init__(self) -> None:
        self._in_a_row = 0

    def none(self) -> None:
        """A turn went well."""
        self._in_a_row = 0

    def count(self, error: Exception) -> None:
        """A turn failed. Raises the error where too many did, which ends the loop's task."""
        if isinstance(error, RedisError | OSError):
            return
        self._in_a_row += 1
        if self._in_a_row >= MAX_DEFECTS:
            raise error


class ItemWork:
    """The work on one item that a worker has in hand, which is no long-lived task: whether it gets on.

    It does with each `beat` of the tasks that it consists of. Make it in the context in which they are made.
    """

    def __init__(self, liveness: Liveness) -> None:
        self._liveness = liveness
        self._beaten_at = liveness.elapsed_s
        self.slack_s = 0.0
        """What the step that it is at may take beside what any may."""
        _of_work.set(self)

    def beat(self) -> None:
        """It made progress."""
        self._beaten_at = self._liveness.elapsed_s

    @property
    def still_s(self) -> float:
        """Seconds since its last progress, of those in which the event loop turned."""
        return self._liveness.elapsed_s - self._beaten_at


_of_task: dict[asyncio.Task[Any], LongTask] = {}
_of_work: ContextVar[ItemWork | None] = ContextVar("item in hand", default=None)


class Liveness:
    """Starts long-lived tasks and knows them. One a worker."""

    def __init__(self) -> None:
        self.elapsed_s = 0.0
        """A clock that its watcher moves: it stands while the event loop does, for then no task can beat."""
        self.ended: Callable[[LongTask], None] = lambda long_task: None
        """Called with each task that ended, well or not, until `close`."""
        self.failed = False
        """The worker goes: it claims and renews nothing more, and hands over what it has."""
        self.expected: set[str] = set()
        """Tasks that somebody else starts (`enter`), and without which the worker does nothing."""
        self._tasks: list[LongTask] = []
        self._closed = False

    @property
    def tasks(self) -> list[LongTask]:
        """Those that run."""
        return list(self._tasks)

    @property
    def names(self) -> set[str]:
        """Of those that run."""
        return {long_task.name for long_task in self._tasks}

    @property
    def complete(self) -> bool:
        """Whether all that are expected run."""
        return self.expected <= self.names

    def start(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        """Run this for as long as the worker lives."""
        return self._add(name, asyncio.create_task(work, name=name), passing=False)

    def start_passing(self, work: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        """As `start`, but it may end by itself, once it has done what it is for."""
        return self._add(name, asyncio.create_task(work, name=name), passing=True)

    def enter(self, name: str) -> None:
        """The task that calls this is a long-lived one, from now on to its end; somebody else started it."""
        task = asyncio.current_task()
        assert task
        self._add(name, task, passing=False)

    def close(self) -> None:
        """The worker stops: that its tasks end is as it should be."""
        self._closed = True

    def _add(self, name: str, task: asyncio.Task[Any], *, passing: bool) -> asyncio.Task[Any]:
        long_task = _of_task[task] = LongTask(self, name, task)
        self._tasks.append(long_task)

        def done(task: asyncio.Task[Any]) -> None:
            del _of_task[task]
            self._tasks.remove(long_task)
            if not self._closed and not passing:
                self.ended(long_task)

        task.add_done_callback(done)
        return task


def beat() -> None:
    """The task that calls this made progress: something is done, or there is nothing to do. No effect where the task is
    no long-lived one, and does not work on an item in hand."""
    task = asyncio.current_task()
    if task and (long_task := _of_task.get(task)):
        long_task.beat()
    elif work := _of_work.get():
        work.beat()


@contextmanager
def slack(seconds: float) -> Generator[None]:
    """What the current task, or the work on an item in hand, does inside of this block may take so much longer than any
    step may: work outside of the bus that has a bound of its own."""
    task = asyncio.current_task()
    work = (_of_task.get(task) if task else None) or _of_work.get()
    if work is None:
        yield
        return
    work.beat()
    work.slack_s += seconds
    try:
        yield
    finally:
        work.slack_s -= seconds
        work.beat()


async def beating(work: Coroutine[Any, Any, T], *, most_s: float) -> T:
    """The work's result; while it is under way, in a task of its own, its caller beats, for ``most_s`` at the most."""
    loop = asyncio.get_running_loop()
    until = loop.time() + most_s
    task = asyncio.create_task(work)
    try:
        while not (await asyncio.wait({task}, timeout=IDLE_S))[0]:
            if loop.time() < until:
                beat()
    except BaseException:
        task.cancel()
        await asyncio.wait({task})
        raise
    beat()
    return task.result()


async def acquire(places: asyncio.Semaphore | asyncio.Lock) -> None:
    """Take a place, however long that lasts, with a beat each `IDLE_S`. Whoever holds it must beat, too."""
    while places.locked():
        try:
            async with asyncio.timeout(IDLE_S):
                await places.acquire()
                return
        except TimeoutError:
            beat()
    await places.acquire()


@asynccontextmanager
async def holding(lock: asyncio.Semaphore | asyncio.Lock) -> AsyncGenerator[None]:
    """Hold the lock, or one place of a semaphore, inside of this block; see `acquire`."""
    await acquire(lock)
    try:
        yield
    finally:
        lock.release()


async def wait_briefly(event: asyncio.Event, *, timeout_s: float = IDLE_S) -> bool:
    """Wait for the event, `IDLE_S` at the most, and `beat`: for loops that look again then. Whether it is set."""
    try:
        async with asyncio.timeout(min(max(timeout_s, 0.0), IDLE_S)):
            await event.wait()
    except TimeoutError:
        pass
    beat()
    return event.is_set()


async def rest(seconds: float) -> None:
    """Sleep, however long, with a beat each `IDLE_S`."""
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while (left := until - loop.time()) > 0:
        await asyncio.sleep(min(left, IDLE_S))
        beat()
