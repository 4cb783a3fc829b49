"""What chaos changes inside a worker process before the worker starts: see `prepare`.

The worker is what `tokenbus worker KIND` runs, from the entry point of the command line on.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, cast

from tests.awaited import path_of
from tests.chaos.broken import BUILDS
from tokenbus.bus import liveness
from tokenbus.bus.liveness import LongTask
from tokenbus_services.cli import worker

LEFT_BEHIND = "left behind:"
"""Prefix of a worker's last line if it ended with open tasks or sockets."""
REPORT = signal.SIGUSR1
"""On this signal a worker logs where each of its tasks waits."""
END, FREEZE = signal.SIGUSR2, signal.SIGWINCH
"""On these signals one of its long-lived tasks ends, or stalls forever."""
_CLOSING_STEPS = 100
"""Of 10 ms, that a connect which was given up in the last step may take to close its socket."""


def prepare(build: str, clock: str) -> None:
    """Apply this broken build of `tests.chaos.broken`, if one is named; make the wall clock jump by this seed, if there
    is one; handle the signals above; and report leftovers at the end.
    """
    if build:
        BUILDS[build]()
    if clock:
        _let_the_clock_jump(clock)
    serve: Any = worker.serve
    worker.serve = _watched(serve)


def _watched(serve: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Run the service, and check what it leaves behind when it has stopped."""

    async def watched(*args: Any, **how: Any) -> None:
        sockets = _sockets()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(REPORT, _report_tasks)
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


def _watched_tasks(*, that_may_end: bool) -> list[LongTask]:
    """What the worker's supervision watches: each may be hurt, whenever it was started. Work on a run or an item is not
    among them: its end is the end of that work.
    """
    watched: dict[asyncio.Task[Any], LongTask] = vars(liveness)["_of_task"]
    return [each for each in watched.values() if not each.task.done() and (that_may_end or not each.may_end)]


def _inject(how: Callable[[asyncio.Task[Any]], None]) -> None:
    tasks = [each.task for each in _watched_tasks(that_may_end=how is _freeze)]
    # A task that is about to run does not wait for anything.
    waits = [(task, getattr(task, "_fut_waiter", None)) for task in tasks]
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
