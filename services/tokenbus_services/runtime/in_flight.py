"""Items of a work queue in this process's hands: each in a task of its own, any of them stopped at once.

Work that makes no progress for longer than all timeouts that apply to it is stuck: it is stopped, and its item is
poison. Else its heartbeat would keep it from everybody, for ever.
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
LOOK_S = 10.0
"""How often work is looked at whether it gets on."""


class NotStarted(Exception):
    """Raised by work that did not begin: another worker shall have the item, as if it had never been here."""


class Later(Exception):
    """Raised by work that cannot be done now: the item goes to the end of its queue, as if never delivered."""


class WorkStuck(TokenbusError):
    """The work on an item made no progress for longer than all timeouts that apply to it."""

    code = "work_stuck"

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"the work made no progress for {seconds:.0f} s, longer than all of its timeouts, and was stopped"
        )
        self.seconds = seconds


class _Work:
    """One item in hand."""

    def __init__(self, item: QueueItem) -> None:
        self.item = item
        self.progress: ItemWork | None = None
        self.lost = False
        """The item is another worker's by now."""
        self._stopped = False
        self.task: asyncio.Task[None] | None = None
        """What may be cancelled at any moment."""
        self.whole: asyncio.Task[None] | None = None
        """The work and what must follow it."""

    @property
    def stopped(self) -> bool:
        """Whether it was to end; else, where its task was cancelled, nobody here wanted that."""
        return self._stopped

    def stop(self) -> None:
        """Cancel the task, once: a second time would break off what it does to end, and leave a socket open."""
        if self.task and not self._stopped:
            self._stopped = True
            self.task.cancel()


class InFlight:
    """Works items until done, and then finishes them."""

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
        """``most``: items at once. ``work`` may raise NotStarted and Later. A shutdown awaits ``abandon`` in place of
        finishing what it stops; ``poisoned`` is awaited, before it is finished, with an item whose work raised: trying
        it again would raise again. ``again``: see `Queue.finish`. ``still_s``: so long an item's work may take from one
        `beat` to the next, by the clock of ``liveness``, and longer by the `slack` of the step that it is at."""
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
        """By stream and entry: two partitions may give out one id."""
        self._stopping = False

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, item: QueueItem) -> bool:
        """Whether it is in hand, or was until a moment ago and could not be given back."""
        return _key(item) in self._items

    async def room(self) -> None:
        """Wait until one more item may begin."""
        await acquire(self._room)
        self._room.release()

    async def start(self, item: QueueItem) -> None:
        """Begin on an item."""
        await acquire(self._room)
        work = self._items[_key(item)] = _Work(item)
        work.task = asyncio.create_task(self._begin(work), name=f"work {item.entry_id}")
        work.whole = asyncio.create_task(self._supervise(work, work.task))

    def on_claimed_away(self, item: QueueItem) -> None:
        """Another worker took the item over: stop."""
        if work := self._items.get(_key(item)):
            work.lost = True
            work.stop()

    def stop_item(self, item: QueueItem) -> None:
        """Nobody wants this item's work any more: stop."""
        if work := self._items.get(_key(item)):
            work.stop()

    def cancel(self, run: str, *, which: Callable[[QueueItem], bool] = lambda item: True) -> None:
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

    async def _begin(self, work: _Work) -> None:
        work.progress = ItemWork(self._liveness)
        await self._work(work.item)

    async def _ended(self, work: _Work, task: asyncio.Task[None]) -> Exception | None:
        """Wait until the work has ended. What is wrong with it, if it did not end by itself or as it was asked to."""
        step_s = self._still_s(work.item)
        while not (await asyncio.wait({task}, timeout=min(LOOK_S, step_s)))[0]:
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
                self._queue.release([item])  # what it did is not known, and finished it is not
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
            # Kept alive here it would be nobody's. Whoever claims it knows by its deliveries that it was begun.
            log.error("item_left", stream=item.stream, entry=item.entry_id, exc_info=e)
            self._queue.release([item])
        finally:
            if self._items.get(_key(item)) is work:  # else it came back here while its lost work still ended
                del self._items[_key(item)]
            self._room.release()


def _error_of(task: asyncio.Task[None]) -> Exception | None:
    error = task.exception()
    return error if isinstance(error, Exception) else None


def _key(item: QueueItem) -> tuple[str, str]:
    return item.stream, item.entry_id


async def dead_letter_item(server: Server, settings: Settings, stage: str, item: QueueItem, error: Exception) -> None:
    """Poison in a work queue: the item goes to the dead stream, and its run ends `failed`."""
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
