"""Background work on one partition of a stage while the stage reads the others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from redis.exceptions import RedisError

from tokenbus.bus.liveness import Liveness

log = logging.getLogger(__name__)


class BackgroundTasks:
    """At most one task per partition. Do not read a partition while its task runs."""

    def __init__(self, group: str, liveness: Liveness) -> None:
        self._group = group
        self._liveness = liveness
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._closed = False

    def __contains__(self, partition: int) -> bool:
        """Whether a task is running for the partition."""
        return partition in self._tasks

    def start(self, partition: int, doing: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Start `doing` for a partition. The task never raises; it logs failures."""

        async def do() -> None:
            try:
                await doing()
            except (RedisError, OSError) as e:
                if not self._closed:
                    log.warning("%s partition %d: %s", self._group, partition, e)
                    self._liveness.failed_work(f"background {self._group}")
            except Exception:
                # Its input is read again, because the partition's offset did not move. An entry that always fails in
                # this way is processed alone after some loads, and then given up.
                log.exception("%s partition %d", self._group, partition)
                self._liveness.failed_work(f"background {self._group}")
            finally:
                del self._tasks[partition]

        name = f"{self._group} {partition}"
        task = self._tasks[partition] = self._liveness.start_passing(do(), name=name)
        return task

    async def close(self) -> None:
        """Cancel all tasks and wait until they have ended."""
        self._closed = True
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
