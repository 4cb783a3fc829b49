"""What chaos changes inside a worker process before the worker starts: see `prepare`.

The worker is what `tokenbus worker KIND` runs, from the entry point of the command line on.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, cast

from tests.awaited import path_of
from tests.chaos.broken import BUILDS
from tokenbus.bus.liveness import Liveness
from tokenbus_services.cli import worker

LEFT_BEHIND = "left behind:"
"""Prefix of a worker's last line if it ended with open tasks or sockets."""
REPORT = signal.SIGUSR1
"""On this signal a worker logs where each of its tasks waits."""
END, FREEZE = signal.SIGUSR2, signal.SIGWINCH
"""On these signals one of its long-lived tasks ends, or stalls forever."""
_CLOSING_STEPS = 100
"""Of 10 ms, that a connect which was given up in the last step may take to close its socket."""
_OLD_S = 1.0
"""A task that exists for this long counts as long-lived, whenever it was started."""
_LOOK_S = 0.2
_OF_AN_ANSWER = ("reader of ", "watcher of ", "answer of ", "answers of ", "first frame of ")
_NOT_THESE = ("lifespan", "supervisor", "Task-", "replay ", "work ", "tool ", *_OF_AN_ANSWER)
"""Name prefixes of tasks that do not count: those of the harness, of uvicorn, of the tasks' supervisor, and those that
end with their work.
"""
_passing: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
"""Tasks that may end by themselves, but may not stand still."""
_seen: weakref.WeakKeyDictionary[asyncio.Task[Any], float] = weakref.WeakKeyDictionary()
"""When each task was first seen."""
_OF_A_RUN = "-run"
"""Part of the names of a run's tasks, which end with the run."""


def prepare(build: str, clock: str) -> None:
    """Apply this broken build of `tests.chaos.broken`, if one is named; make the wall clock jump by this seed, if there
    is one; handle the signals above; and report leftovers at the end.
    """
    if build:
        BUILDS[build]()
    if clock:
        _let_the_clock_jump(clock)
    _note_passing()
    serve: Any = worker.serve
    worker.serve = _watched(serve)


def _watched(serve: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Run the service, and check what it leaves behind when it has stopped."""

    async def watched(*args: Any, **how: Any) -> None:
        sockets = _sockets()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(REPORT, _report_tasks)
        _look()
        loop.add_signal_handler(END, _inject, _end)
        loop.add_signal_handler(FREEZE, _inject, _freeze)
        await serve(*args, **how)
        await asyncio.sleep(0)  # transports that were closed in the last step go away one step later
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for _ in range(_CLOSING_STEPS):
            if _sockets() <= sockets:
                break
            await asyncio.sleep(0.01)
        if tasks or (more := _sockets() - sockets) > 0:
            names = sorted(task.get_name() for task in tasks)
            print(LEFT_BEHIND, f"tasks {names}" if tasks else f"{more} sockets", flush=True)

    return watched


def _report_tasks() -> None:
    for task in asyncio.all_tasks():
        print(path_of(task), flush=True)


def _look() -> None:
    loop = asyncio.get_running_loop()
    for task in asyncio.all_tasks():
        _seen.setdefault(task, loop.time())
    loop.call_later(_LOOK_S, _look)


def _long_lived() -> list[asyncio.Task[Any]]:
    before = asyncio.get_running_loop().time() - _OLD_S
    named = [(task, task.get_name()) for task, since in _seen.items() if since <= before and not task.done()]
    return [task for task, name in named if not name.startswith(_NOT_THESE) and _OF_A_RUN not in name]


def _note_passing() -> None:
    """Record the tasks that the worker itself declares to end by themselves."""
    start: Any = Liveness.start_passing

    def noted(self: Liveness, work: Any, *, name: str) -> Any:
        task = start(self, work, name=name)
        _passing.add(task)
        return task

    cast(Any, Liveness).start_passing = noted


def _inject(how: Callable[[asyncio.Task[Any]], None]) -> None:
    old = [task for task in _long_lived() if how is _freeze or task not in _passing]
    # A task that is about to run does not wait for anything.
    waits = [(task, getattr(task, "_fut_waiter", None)) for task in old]
    waiting = [task for task, waits_for in waits if waits_for is not None and not waits_for.done()]
    if not waiting:
        asyncio.get_running_loop().call_later(0.01, _inject, how)
        return
    task = random.choice(waiting)
    print("task fault:", how.__name__, task.get_name(), flush=True)
    how(task)


def _end(task: asyncio.Task[Any]) -> None:
    task.cancel()


def _freeze(task: asyncio.Task[Any]) -> None:
    """Nothing wakes the task again: what it waits for forgets it."""
    waits_for = cast(Any, getattr(task, "_fut_waiter", None))
    callbacks: list[Any] = list(getattr(waits_for, "_callbacks", None) or ())
    for woken, _ in callbacks:
        if getattr(woken, "__self__", None) is task:
            waits_for.remove_done_callback(woken)


def _let_the_clock_jump(seed: str) -> None:
    """The wall clock of this process alone is sometimes right, and sometimes seconds or minutes off in either
    direction.
    """
    chance = random.Random(seed)
    really, really_ns, since = time.time, time.time_ns, time.monotonic
    state = [0.0, since() + chance.uniform(0.0, 4.0)]

    def off_s() -> float:
        if since() > state[1]:
            state[:] = chance.choice((0.0, 0.7, -0.7, 5.0, -5.0, 200.0, -200.0)), since() + chance.uniform(1.0, 8.0)
        return state[0]

    time.time = lambda: really() + off_s()
    time.time_ns = lambda: really_ns() + int(off_s() * 1e9)


def _sockets() -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return count
