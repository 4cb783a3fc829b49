"""Where a task waits: the path of coroutines from its first to the one that stalls."""

from __future__ import annotations

import asyncio
import gc
from typing import Any


def path_of(task: asyncio.Task[Any]) -> str:
    """The task's name, and each function that waits for the next, with its line."""
    waits_in: Any = task.get_coro()
    path: list[str] = []
    while waits_in is not None:
        frame = getattr(waits_in, "cr_frame", None) or getattr(waits_in, "ag_frame", None)
        path.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}" if frame else repr(waits_in))
        waits_in = getattr(waits_in, "cr_await", None) or getattr(waits_in, "ag_await", None)
    return f"task {task.get_name()}: {' > '.join(path)}"


def all_paths() -> str:
    """Those of every task of this process that is not done, whether its loop still runs or was interrupted."""
    # `isinstance` would ask what a weak proxy stands for, which may be gone.
    tasks: list[asyncio.Task[Any]] = [thing for thing in gc.get_objects() if issubclass(type(thing), asyncio.Task)]
    return "\n".join(sorted(path_of(task) for task in tasks if not task.done()))
