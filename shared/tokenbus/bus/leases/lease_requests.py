"""Pending requests about the leases of partitions: at most one for each partition, each in a task of its own.

In a Cluster there is one request for each partition, so that a node that does not answer delays its own partitions
alone. Elsewhere one request is about all partitions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

from redis.exceptions import RedisError

from tokenbus.bus.liveness import Liveness

log = logging.getLogger(__name__)


class OnNoAnswer(Protocol):
    """Called if the server did not answer. ``again``: the last request about these partitions had no answer either."""

    def __call__(self, partitions: list[int], error: Exception, *, again: bool) -> None: ...


class LeaseRequests:
    """The pending requests of one group's leases."""

    def __init__(self, group: str, liveness: Liveness, *, on_no_answer: OnNoAnswer, by_partition: bool) -> None:
        """``by_partition``: each partition may be on a node of its own."""
        self._group = group
        self._liveness = liveness
        self._on_no_answer = on_no_answer
        self._by_partition = by_partition
        self._tasks: dict[int, asyncio.Task[Exception | None]] = {}
        """By partition."""
        self._unanswered: set[int] = set()
        """Partitions whose server failed to answer the last request."""

    @property
    def pending(self) -> set[asyncio.Task[Exception | None]]:
        """The tasks of all pending requests."""
        return set(self._tasks.values())

    def groups(self, partitions: Iterable[int]) -> list[list[int]]:
        """The partitions without a pending request, grouped if they are known to be on one node."""
        free = [p for p in partitions if p not in self._tasks]
        return [[p] for p in free] if self._by_partition else [free] if free else []

    def ask(
        self, partitions: list[int], request: Callable[[list[int]], Awaitable[None]]
    ) -> asyncio.Task[Exception | None]:
        """Send the request about these partitions, which have none. The task returns its error, if any."""
        task = self._liveness.start_passing(
            self._answer(partitions, request), name=f"answer {self._group} {partitions}"
        )
        self._tasks |= dict.fromkeys(partitions, task)
        return task

    async def _answer(self, partitions: list[int], request: Callable[[list[int]], Awaitable[None]]) -> Exception | None:
        try:
            await request(partitions)
            self._unanswered.difference_update(partitions)
        except (RedisError, OSError) as e:
            again = self._unanswered.issuperset(partitions)
            self._unanswered.update(partitions)
            self._on_no_answer(partitions, e, again=again)
            return e
        except Exception as e:
            log.exception("leases of %s", self._group)
            return e
        finally:
            for partition in partitions:
                del self._tasks[partition]
        return None


async def first_error(requests: Sequence[asyncio.Task[Exception | None]], patience_s: float) -> Exception | None:
    """Wait up to ``patience_s`` for the answers; return the first error, or TimeoutError if some are still pending."""
    if not requests:
        return None
    done, late = await asyncio.wait(requests, timeout=patience_s)
    return next((error for task in done if (error := task.result())), TimeoutError() if late else None)
