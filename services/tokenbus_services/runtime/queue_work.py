"""A service that works on the items of a queue by partition: recorder, tools, webhooks."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from functools import partial
from typing import ClassVar

import structlog
from faststream.asgi import AsgiFastStream

from tokenbus.bus.dead_letters import DeadLetter, dead_letter
from tokenbus.bus.keys import InternalTopic, Keys
from tokenbus.bus.liveness import IDLE_S, ItemWork, Liveness, acquire
from tokenbus.bus.scripts.fair_order import Entries
from tokenbus.bus.server.retry import retry_until_available
from tokenbus.bus.server.server import Server
from tokenbus.bus.work_queue import QueueItem, QueueOptions, WorkQueue
from tokenbus.errors import TokenbusError, public_reason
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import CONTROL_ATTEMPT, EventFrame, encode
from tokenbus.events.normalized import Failed
from tokenbus_services.runtime.app.faststream_source import attach
from tokenbus_services.runtime.app.service_app import make_app
from tokenbus_services.runtime.worker_core import WorkerCore
from tokenbus_services.settings import Settings

MOST_DELIVERIES = 3
"""An item whose workers died this often is not tried again: it may be what kills them."""


class QueueService(ABC):
    """A service that works on the items of a queue, up to a number at once; FastStream calls `read` and `start` in a
    loop. An item that is not done when the worker stops is handed back.
    """

    name: str
    """Also of the group."""
    topic: ClassVar[InternalTopic]
    """Its streams, one a partition."""
    description: ClassVar[str]
    fair: ClassVar[Entries | None] = None
    """See `QueueOptions`."""

    def __init__(self, core: WorkerCore, *, most: int) -> None:
        """``most``: maximum items at once."""
        self.liveness = core.liveness
        self._core = core
        self._settings = settings = core.settings
        self._server = core.server
        self._keys = keys = settings.keys
        options = QueueOptions(
            group=self.name,
            worker=core.worker,
            members=keys.members(self.name),
            fair=self.fair,
            on_claimed_away=self._on_claimed_away,
            unreadable=self._poisoned,
        )
        self._queue = WorkQueue(core.server, options, self._streams(keys), keys=keys, liveness=core.liveness)
        self._items = InFlight(
            self._queue,
            most=most,
            work=self._work,
            poisoned=self._poisoned,
            still_s=self._still_s,
            liveness=core.liveness,
        )
        core.deployment.on_grown(self._serve_more)
        attach(
            core.broker,
            stream=f"{settings.prefix}:{{n}}:{self.topic}",
            title=self.name,
            description=self.description,
            read=self.read,
            handle=self.start,
            liveness=core.liveness,
        )

    def app(self) -> AsgiFastStream:
        """The app of a worker that runs this service."""
        core = self._core
        return make_app(self, core.broker, core.registry, stuck_s=core.stuck_s, drain=self.drain)

    def __len__(self) -> int:
        """Number of items in progress."""
        return len(self._items)

    @property
    def ready(self) -> bool:
        """Whether it can work now: the last command reached the server."""
        return self._queue.healthy

    async def open(self) -> None:
        """Join the deployment and start reading. Raises TokenbusError."""
        await self._core.open()
        await self._opening()
        await self._queue.open()

    async def drain(self) -> None:
        """Take nothing new, and let items finish for `stages.drain_s`; once."""
        if not self._queue.closing:
            await self._queue.stop_reading()
            await self._items.drain(self._settings.stages.drain_s)

    async def close(self) -> None:
        """Hand back what has not finished."""
        await self.drain()
        await self._items.stop()
        await self._queue.close()
        await self._closing()
        await self._core.close()

    async def read(self) -> QueueItem:
        """The next item, once there is room for it."""
        await self._items.room()
        return await self._queue.read()

    async def start(self, item: QueueItem) -> None:
        """Begin the work on an item."""
        await self._items.start(item)

    @abstractmethod
    async def _opening(self) -> None:
        """Start what the work needs, before the first item."""

    @abstractmethod
    async def _closing(self) -> None:
        """Release it, after the last one."""

    @abstractmethod
    async def _work(self, item: QueueItem) -> None:
        """Work on an item. May raise NotStarted and Later."""

    @abstractmethod
    def _still_s(self, item: QueueItem) -> float:
        """See `InFlight`."""

    async def _poisoned(self, item: QueueItem, error: Exception) -> None:
        """Dead-letter an item whose work raised, or that cannot be read."""
        await dead_letter_item(self._server, self._settings, self.name, item, error)

    async def _serve_more(self, keys: Keys) -> None:
        """Read the streams of new partitions too."""
        await self._queue.add(self._streams(keys))

    def _on_claimed_away(self, item: QueueItem) -> None:
        self._items.on_claimed_away(item)

    def _streams(self, keys: Keys) -> list[str]:
        return [keys.topic(p, self.topic) for p in range(keys.partitions)]


async def dead_letter_item(server: Server, settings: Settings, stage: str, item: QueueItem, error: Exception) -> None:
    """Copy a poison item to the dead-letter stream. Its run is unaffected."""
    reason = f"{type(error).__name__}: {error}"
    for name, data in item.fields.items():
        run = name.decode(errors="replace")
        dead = DeadLetter(reason=reason, stage=stage, stream=item.stream, entry=item.entry_id, bytes=data, run=run)
        await dead_letter(server, settings.keys, dead, most=settings.retention.dead_entries)


async def dead_letter_run(server: Server, settings: Settings, stage: str, item: QueueItem, error: Exception) -> None:
    """Copy a poison item to the dead-letter stream, and end its run as `failed`."""
    keys = settings.keys
    await dead_letter_item(server, settings, stage, item, error)
    for run in (name.decode(errors="replace") for name in item.fields):
        told = public_reason(error, "the work failed")
        problem = ErrorInfo(code="poison", kind="internal", message=told, where=f"{stage} {item.entry_id}")
        frame = encode(EventFrame(0, CONTROL_ATTEMPT, server.clock.now_ms(), [Failed(problem)]))
        events = keys.topic(keys.partition_of(run), "events")
        await retry_until_available(
            server,
            lambda run=run, frame=frame, events=events: server.client.xadd(events, {run: frame}),
            what=f"end of a run poisoned in {stage}",
        )


# Work without progress for longer than all its timeouts is stuck: it is stopped, and its item is poison. Otherwise its
# heartbeat would keep it from other workers forever.


log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

ABANDON_S = 5.0
CHECK_S = 10.0
"""How often to check all work for progress. One timer for all: thousands of items are in progress at once, and a
waiting task for each would cost 3 KB.
"""


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


class WorkBroken(TokenbusError):
    """The work on an item ended with an exception that is not an `Exception`."""

    code = "work_broken"

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"the work ended with {type(error).__name__}")
        self.__cause__ = error


class _Work:
    """One item in progress."""

    def __init__(self, item: QueueItem, still_s: float) -> None:
        self.item = item
        self.still_s = still_s
        """Longest time without progress, beyond the slack of its current step."""
        self.progress: ItemWork | None = None
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once the work and its completion are over."""
        self.lost = False
        """Whether another worker has claimed the item."""
        self._stopped = False
        self.task: asyncio.Task[None] | None = None
        """The work itself; may be cancelled at any moment."""
        self.completion: asyncio.Task[None] | None = None
        """What follows the work: begins when the work ends, or is found stuck."""

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
        poisoned: Callable[[QueueItem, Exception], Awaitable[None]],
        abandon: Callable[[QueueItem], Awaitable[None]] | None = None,
        again: Callable[[QueueItem], Awaitable[None]] | None = None,
        still_s: Callable[[QueueItem], float],
        liveness: Liveness | None = None,
    ) -> None:
        """Configure the work on items.

        - ``most``: maximum items at once.
        - ``work``: may raise NotStarted and Later.
        - ``poisoned``: awaited before finishing an item whose work raised, because a retry would raise again.
        - ``abandon``: awaited on shutdown for stopped items that have begun (`WorkQueue.mark`); the others are handed
          back. None: all are.
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
        self._check: asyncio.TimerHandle | None = None
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
        """Start work on an item, or hand it back if this worker stops."""
        await acquire(self._room)
        if self._stopping:
            self._room.release()
            await self._queue.hand_back([item])
            return
        work = self._items[_key(item)] = _Work(item, self._still_s(item))
        work.task = asyncio.create_task(self._begin(work), name=f"work {item.entry_id}")
        work.task.add_done_callback(partial(self._ended, work))
        self._check_within(work.still_s)

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
        """Let work in progress finish, for at most ``seconds``; not at all if this worker cannot continue."""
        clock = asyncio.get_running_loop().time
        until = clock() + seconds
        while (works := self._items.values()) and not self._liveness.failed and (left_s := until - clock()) > 0:
            await asyncio.wait([work.over for work in works], timeout=min(left_s, IDLE_S))

    async def stop(self) -> None:
        """Stop what is still in progress: abandon what has begun, hand back the rest.

        Ends within ABANDON_S; items that an unavailable server does not accept until then are left for other workers to
        claim. The server knows of each whether it had begun.
        """
        self._stopping = True
        works = list(self._items.values())
        for work in works:
            work.stop()
        if not works:
            return
        await asyncio.wait([work.over for work in works], timeout=ABANDON_S)
        late = [work for work in works if not work.over.done()]
        if late:
            log.warning("items_not_stopped", items=len(late))
        for work in late:
            if work.completion:
                work.completion.cancel()
            elif work.task:  # it does not end although it was cancelled
                self._leave(work.task)
                self._queue.release([work.item])
                self._remove(work)
        await asyncio.gather(*(work.completion for work in late if work.completion), return_exceptions=True)

    async def _begin(self, work: _Work) -> None:
        work.progress = ItemWork(self._liveness)
        try:
            await self._work(work.item)
        except (asyncio.CancelledError, NotStarted, Later) as e:
            # The task keeps the error, its traceback keeps the work's frames, and their timeouts know the task. Only
            # Python's collector would free all that.
            raise e.with_traceback(None) from None

    def _ended(self, work: _Work, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else _error_of(task)
        if work.completion is None and not work.over.done():
            work.completion = asyncio.create_task(self._complete(work, task, error))

    def _check_within(self, seconds: float) -> None:
        """Check the work in progress in `CHECK_S`, or sooner."""
        loop = asyncio.get_running_loop()
        when = loop.time() + min(CHECK_S, seconds)
        if self._check and self._check.when() > when:
            self._check.cancel()
            self._check = None
        self._check = self._check or loop.call_at(when, self._check_all)

    def _check_all(self) -> None:
        self._check = None
        soonest = CHECK_S
        for work in self._items.values():
            soonest = min(soonest, work.still_s)
            if work.completion is None and work.task and work.progress and work.progress.still_s > work.still_s:
                most_s = work.still_s + work.progress.slack_s
                if work.progress.still_s > most_s and not work.task.done():
                    work.completion = asyncio.create_task(self._give_up(work, work.task, most_s))
        if self._items:
            self._check_within(soonest)

    async def _give_up(self, work: _Work, task: asyncio.Task[None], most_s: float) -> None:
        """Stop stuck work."""
        log.error("work_stuck", stream=work.item.stream, entry=work.item.entry_id, seconds=round(most_s))
        work.stop()
        try:
            ended, _ = await asyncio.wait({task}, timeout=ABANDON_S)
        except asyncio.CancelledError:
            self._queue.release([work.item])
            self._remove(work)
            raise
        if not ended:
            self._leave(task)
        await self._complete(work, task, WorkStuck(most_s))

    def _leave(self, task: asyncio.Task[None]) -> None:
        """Keep a task that does not end although it was stopped."""
        self._left.add(task)
        task.add_done_callback(self._left.discard)

    def _remove(self, work: _Work) -> None:
        if self._items.get(_key(work.item)) is work:  # false if the item came back while its lost work was ending
            del self._items[_key(work.item)]
        work.task = None
        self._room.release()
        if not work.over.done():
            work.over.set_result(None)
        if self._check and not self._items:
            self._check.cancel()
            self._check = None

    async def _complete(self, work: _Work, task: asyncio.Task[None], error: Exception | None) -> None:
        """Finish, requeue or release the item, by how its work ended."""
        item = work.item
        try:
            if work.lost:
                return  # its new worker finishes it
            if self._stopping and task.cancelled():
                if self._abandon and self._queue.has_begun(item):
                    await self._abandon(item)
                else:
                    await self._queue.hand_back([item])
                return
            if task.cancelled() and not work.stopped:
                log.error("work_task_cancelled", stream=item.stream, entry=item.entry_id)
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
            # If kept alive here, no worker would handle it. The server tells the next worker whether it had begun.
            log.error("item_not_finished", stream=item.stream, entry=item.entry_id, exc_info=e)
            self._queue.release([item])
        finally:
            self._remove(work)


def _error_of(task: asyncio.Task[None]) -> Exception | None:
    error = task.exception()
    if error is None or isinstance(error, Exception):
        return error
    # For example a panic in a library written in Rust, or GeneratorExit. The work did not finish.
    return WorkBroken(error)


def _key(item: QueueItem) -> tuple[str, str]:
    return item.stream, item.entry_id
