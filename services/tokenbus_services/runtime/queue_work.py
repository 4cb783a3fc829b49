"""One worker's share of a work queue by partition, and the work on its items: what a queue service consists of."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from tokenbus.bus.dead_letters import DeadLetter, dead_letter
from tokenbus.bus.keys import InternalTopic, Keys
from tokenbus.bus.liveness import Liveness
from tokenbus.bus.scripts.fair_order import Entries
from tokenbus.bus.server.retry import retry_until_available
from tokenbus.bus.server.server import Server
from tokenbus.bus.work_queue import QueueItem, QueueOptions, WorkQueue
from tokenbus.errors import public_reason
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import CONTROL_ATTEMPT, EventFrame, encode
from tokenbus.events.normalized import Failed
from tokenbus_services.runtime.in_flight import InFlight
from tokenbus_services.settings import Settings


class QueueWork:
    """Reads items and works on them, up to a number at once. Call `open`, `read` and `start` in a loop, `close`.

    An item that is not done when the worker stops is handed back.
    """

    def __init__(
        self,
        server: Server,
        settings: Settings,
        *,
        group: str,
        topic: InternalTopic,
        worker: str,
        most: int,
        work: Callable[[QueueItem], Awaitable[None]],
        poisoned: Callable[[QueueItem, Exception], Awaitable[None]],
        still_s: Callable[[QueueItem], float],
        liveness: Liveness,
        fair: Entries | None = None,
    ) -> None:
        """``topic``: its streams, one a partition. ``poisoned`` also gets the items that cannot be read. The others
        are those of `WorkQueue` and `InFlight`.
        """
        keys = settings.keys
        self._topic: InternalTopic = topic
        self._drain_s = settings.stages.drain_s
        self._liveness = liveness
        self._queue = WorkQueue(
            server,
            QueueOptions(
                group=group,
                worker=worker,
                members=keys.members(group),
                fair=fair,
                on_claimed_away=self._on_claimed_away,
                unreadable=poisoned,
            ),
            self._streams(keys),
            keys=keys,
            liveness=liveness,
        )
        self._items = InFlight(
            self._queue,
            most=most,
            work=work,
            poisoned=poisoned,
            still_s=still_s,
            liveness=liveness,
        )

    def __len__(self) -> int:
        """Number of items in progress."""
        return len(self._items)

    @property
    def healthy(self) -> bool:
        """Whether the last command reached the server."""
        return self._queue.healthy

    async def open(self) -> None:
        """Start reading. Raises redis-py's errors."""
        await self._queue.open()

    async def close(self) -> None:
        """Stop reading, let items finish for a while, then hand the rest back."""
        await self._queue.stop_reading()
        await self._items.drain(0 if self._liveness.failed else self._drain_s)
        await self._items.stop()
        await self._queue.close()

    async def add_partitions(self, keys: Keys) -> None:
        """Read the streams of new partitions too."""
        await self._queue.add(self._streams(keys))

    async def read(self) -> QueueItem:
        """The next item, once there is room for it."""
        await self._items.room()
        return await self._queue.read()

    async def start(self, item: QueueItem) -> None:
        """Work on the item."""
        await self._items.start(item)

    def cancel(self, run: str) -> None:
        """Stop the work of a cancelled run."""
        self._items.cancel(run)

    def _on_claimed_away(self, item: QueueItem) -> None:
        self._items.on_claimed_away(item)

    def _streams(self, keys: Keys) -> list[str]:
        return [keys.topic(p, self._topic) for p in range(keys.partitions)]


async def dead_letter_item(server: Server, settings: Settings, stage: str, item: QueueItem, error: Exception) -> None:
    """Move a poison item to the dead-letter stream and end its run as `failed`."""
    keys = settings.keys
    reason = f"{type(error).__name__}: {error}"
    for name, data in item.fields.items():
        run = name.decode(errors="replace")
        dead = DeadLetter(reason=reason, stage=stage, stream=item.stream, entry=item.entry_id, bytes=data, run=run)
        await dead_letter(server, keys, dead, most=settings.retention.dead_entries)
        told = public_reason(error, "the work failed")
        problem = ErrorInfo(code="poison", kind="internal", message=told, where=f"{stage} {item.entry_id}")
        frame = encode(EventFrame(0, CONTROL_ATTEMPT, server.clock.now_ms(), [Failed(problem)]))
        events = keys.topic(keys.partition_of(run), "events")
        await retry_until_available(
            server,
            lambda run=run, frame=frame, events=events: server.client.xadd(events, {run: frame}),
            what=f"end of a run poisoned in {stage}",
        )
