"""Items of a work queue in this process's hands: each in a task of its own, any of them stopped at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from tokenbus.bus.dead import DeadEntry, bury
from tokenbus.bus.outage import outlast
from tokenbus.bus.queue import Item, Queue
from tokenbus.bus.server import Server
from tokenbus.events.failure import ErrorInfo
from tokenbus.events.frames import CONTROL_ATTEMPT, EventFrame, encode
from tokenbus.events.normalized import Failed
from tokenbus_services.settings import Settings

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

ABANDON_S = 5.0


class NotBegun(Exception):
    """Raised by work that did not begin: another worker shall have the item, as if it had never been here."""


class _Work:
    """One item in hand."""

    def __init__(self, item: Item) -> None:
        self.item = item
        self.lost = False
        """The item is another worker's by now."""
        self._stopped = False
        self.task: asyncio.Task[None] | None = None
        """What may be cancelled at any moment."""
        self.whole: asyncio.Task[None] | None = None
        """The work and what must follow it."""

    def stop(self) -> None:
        """Cancel the task, once: a second time would break off what it does to end, and leave a socket open."""
        if self.task and not self._stopped:
            self._stopped = True
            self.task.cancel()


class InFlight:
    """Works items until done, and then finishes them."""

    def __init__(
        self,
        queue: Queue,
        *,
        most: int,
        work: Callable[[Item], Awaitable[None]],
        abandon: Callable[[Item], Awaitable[None]],
        poisoned: Callable[[Item, Exception], Awaitable[None]],
        again: Callable[[Item], Awaitable[None]] | None = None,
    ) -> None:
        """``most``: items at once. ``work`` may raise NotBegun. A shutdown awaits ``abandon`` in place of finishing
        what it stops; ``poisoned`` is awaited, before it is finished, with an item whose work raised: trying it again
        would raise again. ``again``: see `Queue.finish`."""
        self._queue = queue
        self._work = work
        self._abandon = abandon
        self._poisoned = poisoned
        self._again = again
        self._room = asyncio.Semaphore(most)
        self._items: dict[tuple[str, str], _Work] = {}
        """By stream and entry: two partitions may give out one id."""
        self._stopping = False

    def __len__(self) -> int:
        return len(self._items)

    async def room(self) -> None:
        """Wait until one more item may begin."""
        await self._room.acquire()
        self._room.release()

    async def start(self, item: Item) -> None:
        """Begin on an item."""
        await self._room.acquire()
        work = self._items[_key(item)] = _Work(item)
        work.task = asyncio.create_task(self._begin(item), name=f"work {item.entry_id}")
        work.whole = asyncio.create_task(self._see_through(work, work.task))

    def lost(self, item: Item) -> None:
        """Another worker took the item over: stop."""
        if work := self._items.get(_key(item)):
            work.lost = True
            work.stop()

    def stop_item(self, item: Item) -> None:
        """Nobody wants this item's work any more: stop."""
        if work := self._items.get(_key(item)):
            work.stop()

    def cancel(self, run: str, *, which: Callable[[Item], bool] = lambda item: True) -> None:
        """The run was cancelled: stop what is done for it, or such of it as ``which`` says."""
        for work in self._items.values():
            if run.encode() in work.item.fields and which(work.item):
                work.stop()

    async def drain(self, seconds: float) -> None:
        """Let what is in hand finish, for so long at the most."""
        if tasks := self._tasks():
            await asyncio.wait(tasks, timeout=seconds)

    async def stop(self) -> None:
        """Stop what is still in hand, and abandon it.

        Ends within ABANDON_S: what a server that is away does not take until then is left to be claimed by others.
        """
        self._stopping = True
        tasks = self._tasks()
        for work in self._items.values():
            work.stop()
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=ABANDON_S)
        if late:
            log.warning("items_left_behind", items=len(late))
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [w.whole for w in self._items.values() if w.whole]

    async def _begin(self, item: Item) -> None:
        await self._work(item)

    async def _see_through(self, work: _Work, task: asyncio.Task[None]) -> None:
        item = work.item
        try:
            await asyncio.wait({task})
            if work.lost:
                return  # its new worker finishes it
            if self._stopping and task.cancelled():
                await self._abandon(item)
                return
            error = None if task.cancelled() else task.exception()
            if isinstance(error, NotBegun):
                await outlast(lambda: self._queue.hand_back([item]), what="hand-back")
                return
            if isinstance(error, Exception):
                log.error("work_failed", stream=item.stream, entry=item.entry_id, exc_info=error)
                await self._poisoned(item, error)
            again = self._again if error is None else None
            await self._queue.finish([item], again=again and (lambda: again(item)))
        finally:
            if self._items.get(_key(item)) is work:  # else it came back here while its lost work still ended
                del self._items[_key(item)]
            self._room.release()


def _key(item: Item) -> tuple[str, str]:
    return item.stream, item.entry_id


async def bury_item(server: Server, settings: Settings, stage: str, item: Item, error: Exception) -> None:
    """Poison in a work queue: the item goes to the dead stream, and its run ends `failed`."""
    keys = settings.keys
    reason = f"{type(error).__name__}: {error}"
    for name, data in item.fields.items():
        run = name.decode(errors="replace")
        dead = DeadEntry(reason=reason, stage=stage, stream=item.stream, entry=item.entry_id, bytes=data, run=run)
        await bury(server, keys, dead, most=settings.retention.dead_entries)
        problem = ErrorInfo(code="poison", kind="internal", message=reason, where=f"{stage} {item.entry_id}")
        frame = encode(EventFrame(0, CONTROL_ATTEMPT, time.time_ns() // 1_000_000, [Failed(problem)]))
        events = keys.topic(keys.partition_of(run), "events")
        await outlast(
            lambda run=run, frame=frame, events=events: server.client.xadd(events, {run: frame}),
            what=f"end of a run poisoned in {stage}",
        )
