"""A bounded set of background tasks whose errors are logged."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextvars import copy_context

import structlog

from tokenbus.bus.liveness import SideWork, beat, liveness_of_caller

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

CHECK_S = 0.5
STRAGGLING_S = 0.05
"""How long `run` waits for the tasks it started; normally they have ended by then."""


class LoggedTasks:
    """Runs background work, some of which may hang, for example on a Cluster node that is unavailable. Call `close` at
    the end.
    """

    def __init__(self, name: str, *, most: Callable[[], int]) -> None:
        """``most``: maximum concurrent tasks; asked each time, because the number of partitions may change."""
        self._name = name
        self._most = most
        self._tasks: dict[asyncio.Task[None], SideWork] = {}

    async def run(self, works: Iterable[Callable[[], Awaitable[None]]], *, patience_s: float = STRAGGLING_S) -> None:
        """Start each work item and wait up to ``patience_s``; the rest continues in the background. Waits while too
        many run. The caller counts as alive meanwhile only if one of them makes progress.
        """
        started: set[asyncio.Task[None]] = set()
        for work in works:
            while len(self._tasks) >= self._most():
                if not all(side.is_stuck for side in self._tasks.values()):
                    beat()
                await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED, timeout=CHECK_S)
            started.add(self._start(work))
        if started:
            await asyncio.wait(started, timeout=patience_s)

    def _start(self, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        async def do() -> None:
            await work()

        context = copy_context()
        side = context.run(SideWork, liveness_of_caller())
        task = asyncio.create_task(do(), name=self._name, context=context)
        self._tasks[task] = side
        task.add_done_callback(self._tasks.pop)
        task.add_done_callback(_log_defect)
        return task

    async def close(self) -> None:
        """Cancel what still runs, and wait for it to end."""
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _log_defect(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        log.error("task_ended", task=task.get_name(), exc_info=error)
