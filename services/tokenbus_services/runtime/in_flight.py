"""Runs the items of a work queue, each in a task of its own that can be stopped at any time.

Work without progress for longer than all its timeouts is stuck: it is stopped, and its item is poison. Otherwise its
heartbeat would keep it from other workers forever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from tokenbus.bus.dead_letters import DeadLetter, dead_letter
from tokenbus.bus.liveness import ItemWork, Liveness, acquire
from tokenbus.bus.server.retry import retry_until_available
from tokenbus.bus.server.server import Server
from tokenbus.bus.work_queue import QueueItem, WorkQueue
from tokenbus.errors import TokenbusError
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import CONTROL_ATTEMPT, EventFrame, encode
from tokenbus.events.normalized import Failed
from tokenbus_services.settings import Settings

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

ABANDON_S = 5.0
CHECK_S = 10.0
"""How often to check work for progress."""


class NotStarted(Exception):
    """Raised by work that did not begin: another worker gets the item as if it had never been delivered."""


class Later(Exception):
    """Raised by work that cannot be done now: the item goes to the end of its queue as if never delivered."""


class WorkStuck(TokenbusError):
    """The work on an item made no progress for longer than all timeouts that apply to it."""

    code = "work_stuck"

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"the work made no progress for {seconds:.0f} s, longer than all of its timeouts, and was stopped"
        )
        self.seconds = seconds


class _Work:
    """One item in progress."""

    def __init__(self, item: QueueItem) -> None:
        self.item = item
        self.progress: ItemWork | None = None
        self.lost = False
        """Whether another worker has claimed the item."""
        self._stopped = False
        self.task: asyncio.Task[None] | None = None
        """The work itself; may be cancelled at any moment."""
        self.whole: asyncio.Task[None] | None = None
        """The work and its completion."""

    @property
    def stopped(self) -> bool:
        """Whether it was asked to stop. If not, and its task was cancelled, the cancellation is a defect."""
        return self._stopped

    def stop(self) -> None:
        """Cancel the task, once: a second cancellation would interrupt its cleanup and leave a socket open."""
        if self.task and not self._stopped:
            self._stopped = True
            self.task.cancel()


class InFlight:
    """Works on items until they are done, then finishes them."""

    def __init__(
        self,
        queue: WorkQueue,
        *,
        most: int,
        work: Callable[[QueueItem], Awaitable[None]],
        abandon: Callable[[QueueItem], Awaitable[None]],
        poisoned: Callable[[QueueItem, Exception], Awaitable[None]],
        again: Callable[[QueueItem], Awaitable[None]] | None = None,
        still_s: Callable[[QueueItem], float],
        liveness: Liveness | None = None,
    ) -> None:
        """Configure the work on items.

        - ``most``: maximum items at once.
        - ``work``: may raise NotStarted and Later.
        - ``abandon``: awaited on shutdown, instead of finishing, for items that are stopped.
        - ``poisoned``: awaited before finishing an item whose work raised, because a retry would raise again.
        - ``again``: see `WorkQueue.finish`.
        - ``still_s``: longest time between two `beat` calls of an item's work, by the clock of ``liveness``, plus the
          `slack` of its current step.
        """
        self._queue = queue
        self._work = work
        self._abandon = abandon
        self._poisoned = poisoned
        self._again = again
        self._still_s = still_s
        self._liveness = liveness or Liveness()
        self._left: set[asyncio.Task[None]] = set()
        """Stuck work that did not end when it was stopped."""
        self._room = asyncio.Semaphore(most)
        self._items: dict[tuple[str, str], _Work] = {}
        """By stream and entry: two partitions may use the same entry id."""
        self._stopping = False

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, item: QueueItem) -> bool:
        """Whether it is in progress, or was a moment ago and could not be given back."""
        return _key(item) in self._items

    async def room(self) -> None:
        """Wait until one more item may start."""
        await acquire(self._room)
        self._room.release()

    async def start(self, item: QueueItem) -> None:
        """Start work on an item."""
        await acquire(self._room)
        work = self._items[_key(item)] = _Work(item)
        work.task = asyncio.create_task(self._begin(work), name=f"work {item.entry_id}")
        work.whole = asyncio.create_task(self._supervise(work, work.task))

    def on_claimed_away(self, item: QueueItem) -> None:
        """Stop: another worker has claimed the item."""
        if work := self._items.get(_key(item)):
            work.lost = True
            work.stop()

    def stop_item(self, item: QueueItem) -> None:
        """Stop: this item's work is no longer needed."""
        if work := self._items.get(_key(item)):
            work.stop()

    def cancel(self, run: str, *, which: Callable[[QueueItem], bool] = lambda item: True) -> None:
        """Stop the work of a cancelled run, or the items of it that ``which`` selects."""
        for work in self._items.values():
            if run.encode() in work.item.fields and which(work.item):
                work.stop()

    async def drain(self, seconds: float) -> None:
        """Let work in progress finish, for at most ``seconds``."""
        if tasks := self._tasks():
            await asyncio.wait(tasks, timeout=seconds)

    async def stop(self) -> None:
        """Stop and abandon what is still in progress.

        Ends within ABANDON_S; items that an unavailable server does not accept until then are left for other workers to
        claim.
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

    async def _begin(self, work: _Work) -> None:
        work.progress = ItemWork(self._liveness)
        await self._work(work.item)

    async def _ended(self, work: _Work, task: asyncio.Task[None]) -> Exception | None:
        """Wait for the work to end. Returns its error, or None if it finished or was stopped on request."""
        step_s = self._still_s(work.item)
        while not (await asyncio.wait({task}, timeout=min(CHECK_S, step_s)))[0]:
            if work.progress and work.progress.still_s > (most_s := step_s + work.progress.slack_s):
                log.error("work_stuck", stream=work.item.stream, entry=work.item.entry_id, seconds=round(most_s))
                work.stop()
                if not (await asyncio.wait({task}, timeout=ABANDON_S))[0]:
                    self._left.add(task)
                    task.add_done_callback(self._left.discard)
                return WorkStuck(most_s)
        return None if task.cancelled() else _error_of(task)

    async def _supervise(self, work: _Work, task: asyncio.Task[None]) -> None:
        item = work.item
        try:
            error = await self._ended(work, task)
            if work.lost:
                return  # its new worker finishes it
            if self._stopping and task.cancelled():
                await self._abandon(item)
                return
            if task.cancelled() and not work.stopped:
                log.error("work_cancelled_by_nobody", stream=item.stream, entry=item.entry_id)
                self._queue.release([item])  # what it did is unknown, so it must not be finished
                return
            if isinstance(error, NotStarted):
                await self._queue.hand_back([item])
                return
            if isinstance(error, Later):
                await self._queue.requeue([item])
                return
            if error is not None:
                log.error("work_failed", stream=item.stream, entry=item.entry_id, exc_info=error)
                await self._poisoned(item, error)
            again = self._again if error is None else None
            await self._queue.finish([item], again=again and (lambda: again(item)))
        except asyncio.CancelledError:
            self._queue.release([item])
            raise
        except Exception as e:
            # If kept alive here, no worker would handle it. Its delivery count tells the next worker that it was begun.
            log.error("item_left", stream=item.stream, entry=item.entry_id, exc_info=e)
            self._queue.release([item])
        finally:
            if self._items.get(_key(item)) is work:  # false if the item came back here while its lost work was ending
                del self._items[_key(item)]
            self._room.release()


def _error_of(task: asyncio.Task[None]) -> Exception | None:
    error = task.exception()
    return error if isinstance(error, Exception) else None


def _key(item: QueueItem) -> tuple[str, str]:
    return item.stream, item.entry_id


async def dead_letter_item(server: Server, settings: Settings, stage: str, item: QueueItem, error: Exception) -> None:
    """Move a poison item to the dead-letter stream and end its run as `failed`."""
    keys = settings.keys
    reason = f"{type(error).__name__}: {error}"
    for name, data in item.fields.items():
        run = name.decode(errors="replace")
        dead = DeadLetter(reason=reason, stage=stage, stream=item.stream, entry=item.entry_id, bytes=data, run=run)
        await dead_letter(server, keys, dead, most=settings.retention.dead_entries)
        problem = ErrorInfo(code="poison", kind="internal", message=reason, where=f"{stage} {item.entry_id}")
        frame = encode(EventFrame(0, CONTROL_ATTEMPT, server.clock.now_ms(), [Failed(problem)]))
        events = keys.topic(keys.partition_of(run), "events")
        await retry_until_available(
            server,
            lambda run=run, frame=frame, events=events: server.client.xadd(events, {run: frame}),
            what=f"end of a run poisoned in {stage}",
        )
