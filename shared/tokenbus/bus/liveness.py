"""Long-lived tasks of one worker: which exist, and when each last made progress.

A worker with a task that has ended or hangs must not keep claiming and renewing: no other worker would take over its
work. So every loop that the worker depends on is started here and calls `beat` on every iteration, idle or not; no loop
waits longer than `IDLE_S` per iteration. A watcher (in a worker, the supervisor of `tokenbus_services.runtime`) detects
tasks that ended or are stuck. Without a watcher nothing is ever overdue, and these are plain tasks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

IDLE_S = 1.0
"""Maximum time between two beats of an idle loop."""
STUCK_S = 6.0
"""A task without a beat for this long is stuck. Every command is a beat and takes at most 5 s (`REPLY_TIMEOUT_S`)."""
MAX_DEFECTS = 10
"""After this many failures in a row a loop is considered broken."""
STUCK_OF_MANY_NODES_S = 15.0
"""`STUCK_S` for topologies in which a command may have to ask several nodes for a key (Sentinel, Cluster)."""


class Progress:
    """When something last made progress, by the clock of its `Liveness`."""

    def __init__(self, liveness: Liveness) -> None:
        self.liveness = liveness
        self.slack_s = 0.0
        """Extra time that the current step may take."""
        self._beaten_at = liveness.elapsed_s

    def beat(self) -> None:
        self._beaten_at = self.liveness.elapsed_s

    @property
    def still_s(self) -> float:
        """Seconds since the last progress, counting only time in which the event loop ran."""
        return self.liveness.elapsed_s - self._beaten_at


class LongTask(Progress):
    def __init__(self, liveness: Liveness, name: str, task: asyncio.Task[Any], *, may_end: bool) -> None:
        super().__init__(liveness)
        self.name = name
        self.task = task
        self.may_end = may_end
        """Whether it ends once its work is done. It is watched for standing still all the same."""


class ItemWork(Progress):
    """Progress of the work on one item, which is not a long-lived task.

    Each `beat` of the tasks that work on the item counts. Create it in the context in which those tasks are created.
    """

    def __init__(self, liveness: Liveness) -> None:
        super().__init__(liveness)
        _of_work.set(self)


class SideWork(ItemWork):
    """Progress of one task that runs concurrently with its caller. Its beats count for the caller's item too, if there
    is one."""

    def __init__(self, liveness: Liveness) -> None:
        self._item = _of_work.get()
        super().__init__(liveness)

    def beat(self) -> None:
        super().beat()
        if self._item:
            self._item.beat()

    @property
    def is_stuck(self) -> bool:
        """Whether it made no progress for longer than a command and its slack may take."""
        return self.still_s > STUCK_OF_MANY_NODES_S + self.slack_s


_of_task: dict[asyncio.Task[Any], LongTask] = {}
_of_work: ContextVar[Progress | None] = ContextVar("work", default=None)


class Liveness:
    """Starts and tracks long-lived tasks. One per worker."""

    def __init__(self) -> None:
        self.elapsed_s = 0.0
        """Clock advanced by the watcher; it stops while the event loop is blocked, because no task can beat then."""
        self.ended: Callable[[LongTask], None] = lambda long_task: None
        """Called with each task that ended, successfully or not, until `close`."""
        self.failed_work: Callable[[str], object] = lambda work: None
        """Called with the name of work that failed and was passed over, so that it can be counted. Few names exist."""
        self.failed = False
        """The worker is shutting down after a failure: it claims and renews nothing more and hands over its work."""
        self.expected: set[str] = set()
        """Names of tasks that are started elsewhere (`enter`) and that the worker cannot do without."""
        self._tasks: list[LongTask] = []
        self._closed = False

    @property
    def tasks(self) -> list[LongTask]:
        """Running tasks."""
        return list(self._tasks)

    @property
    def names(self) -> set[str]:
        """Names of the running tasks."""
        return {long_task.name for long_task in self._tasks}

    @property
    def complete(self) -> bool:
        """Whether all expected tasks run."""
        return self.expected <= self.names

    def start(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        """Start a task that runs for the worker's whole life."""
        return self._add(name, asyncio.create_task(work, name=name), may_end=False)

    def start_passing(self, work: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        """Like `start`, but the task may end once its work is done."""
        return self._add(name, asyncio.create_task(work, name=name), may_end=True)

    def enter(self, name: str) -> None:
        """Register the calling task, which was started elsewhere, as long-lived until it ends."""
        task = asyncio.current_task()
        assert task
        self._add(name, task, may_end=False)

    @staticmethod
    def expect_end(task: asyncio.Task[Any]) -> None:
        """Announce that a task of `start` will be stopped on purpose while the worker continues."""
        if long_task := _of_task.get(task):
            long_task.may_end = True

    def close(self) -> None:
        """The worker is stopping: tasks may end from now on."""
        self._closed = True

    def _add(self, name: str, task: asyncio.Task[Any], *, may_end: bool) -> asyncio.Task[Any]:
        long_task = _of_task[task] = LongTask(self, name, task, may_end=may_end)
        self._tasks.append(long_task)

        def done(task: asyncio.Task[Any]) -> None:
            del _of_task[task]
            self._tasks.remove(long_task)
            if not self._closed and not long_task.may_end:
                self.ended(long_task)

        task.add_done_callback(done)
        return task


def liveness_of_caller() -> Liveness:
    """Return what watches the calling task, for the tasks that its work rests on; a new one if nothing does."""
    task = asyncio.current_task()
    long_task = _of_task.get(task) if task else None
    return long_task.liveness if long_task else Liveness()


def beat() -> None:
    """Record progress of the calling task: it did something, or had nothing to do.

    No effect if the task is neither long-lived nor working on an item.
    """
    beater()()


def beater() -> Callable[[], None]:
    """Return `beat` of the calling task, for a loop that beats often: finding the task costs more than the beat.

    Call it in the task that will use it, and let no other task do so.
    """
    task = asyncio.current_task()
    if task and (long_task := _of_task.get(task)):
        return long_task.beat
    work = _of_work.get()
    return work.beat if work else _no_beat


async def together(parts: Sequence[Coroutine[Any, Any, T]]) -> list[T | BaseException]:
    """Run coroutines concurrently, with the beats of all of them as the caller's. Returns results and errors."""
    task = asyncio.current_task()
    token = _of_work.set((_of_task.get(task) if task else None) or _of_work.get())
    try:
        running = [asyncio.create_task(part) for part in parts]  # each takes a copy of the context
    finally:
        _of_work.reset(token)
    return await asyncio.gather(*running, return_exceptions=True)


def _no_beat() -> None:
    """For a task without a watcher."""


@contextmanager
def slack(seconds: float) -> Generator[None]:
    """Allow the current task or item this much extra time in the block, for work outside the bus with its own limit."""
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
    """Run ``work`` in a separate task and return its result. The caller beats meanwhile, for at most ``most_s``."""
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
    """Acquire without a time limit, with a beat every `IDLE_S`. The holder must beat, too."""
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
    """Hold the lock, or one slot of a semaphore, inside the block; see `acquire`."""
    await acquire(lock)
    try:
        yield
    finally:
        lock.release()


async def wait_briefly(event: asyncio.Event, *, timeout_s: float = IDLE_S) -> bool:
    """Wait for the event for at most `IDLE_S`, with a `beat` before and after; for polling loops. Returns whether it is
    set.
    """
    beat()  # the step before may have been a command that got no answer, which takes almost all of `STUCK_S`
    try:
        async with asyncio.timeout(min(max(timeout_s, 0.0), IDLE_S)):
            await event.wait()
    except TimeoutError:
        pass
    beat()
    return event.is_set()


async def stop_task(task: asyncio.Task[Any] | None) -> None:
    """Cancel a task and wait until it ends, with or without an error. No effect if there is none."""
    if task:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def is_cancelled() -> bool:
    """Whether the calling task was cancelled. If not, a CancelledError is of something that it awaited, and an error of
    that.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def rest(seconds: float) -> None:
    """Sleep for any duration, with a beat at the beginning and every `IDLE_S`."""
    beat()  # as in `wait_briefly`
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while (left := until - loop.time()) > 0:
        await asyncio.sleep(min(left, IDLE_S))
        beat()
