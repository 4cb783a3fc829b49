"""How a worker gives its items back: finished, to be done by another worker, or marked as begun."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from tokenbus.bus import scripts
from tokenbus.bus.scripts.fair_order import Entries, put_back
from tokenbus.bus.server.retry import retry_until_available
from tokenbus.bus.server.run_scripts import run_script, run_scripts
from tokenbus.bus.server.server import Server
from tokenbus.bus.work_queue.items import ClaimedItems, QueueItem


class ItemWrites:
    """Methods retry until the server accepts, unless they say otherwise."""

    def __init__(self, server: Server, claimed: ClaimedItems, *, group: str, worker: str, fair: Entries | None) -> None:
        self._server = server
        self._claimed = claimed
        self._group = group
        self._worker = worker
        self._fair: Entries | None = fair

    async def finish(self, items: Sequence[QueueItem], *, again: Callable[[], Awaitable[None]] | None = None) -> None:
        """See `WorkQueue.finish`."""
        calls = [
            scripts.finish(stream, group=self._group, consumer=self._worker, ids=ids)
            for stream, ids in self._claimed.release(items).items()
        ]
        tried = False

        async def once() -> None:
            nonlocal tried
            if tried and again:
                await again()
            tried = True
            await run_scripts(self._server, calls)

        await retry_until_available(self._server, once, what=f"finish of {self._group}")

    async def hand_back(self, items: Sequence[QueueItem]) -> None:
        """See `WorkQueue.hand_back`."""
        await retry_until_available(
            self._server, lambda: self.put_back(items, in_front=True), what=f"hand-back of {self._group}"
        )

    async def discard(self, items: Sequence[QueueItem]) -> None:
        """Return items of a fair queue that were not begun to wait for their turn."""
        await retry_until_available(
            self._server, lambda: self.put_back(items, in_front=False), what=f"items passed over in {self._group}"
        )

    async def put_back(self, items: Sequence[QueueItem], *, in_front: bool) -> None:
        """Return items to the queue, tried once. Raises redis-py's errors."""
        group, consumer, fair = self._group, self._worker, self._fair
        calls = [
            put_back(stream, fair, group=group, consumer=consumer, ids=ids, in_front=in_front)
            if fair
            else scripts.hand_back(stream, group=group, consumer=consumer, ids=ids)
            for stream, ids in self._claimed.release(items).items()
        ]
        await run_scripts(self._server, calls)

    async def requeue(self, items: Sequence[QueueItem]) -> None:
        """Move items that were not begun to the end of their queues."""
        calls = [
            scripts.requeue(stream, group=self._group, consumer=self._worker, ids=ids)
            for stream, ids in self._claimed.release(items).items()
        ]
        await retry_until_available(
            self._server, lambda: run_scripts(self._server, calls), what=f"requeue of {self._group}"
        )

    async def mark(self, item: QueueItem, *, begun: bool) -> bool:
        """See `WorkQueue.mark`."""
        call = scripts.mark(item.stream, group=self._group, consumer=self._worker, entry=item.entry_id, begun=begun)
        ours = await retry_until_available(
            self._server, lambda: run_script(self._server, call), what=f"mark of {self._group}"
        )
        if ours and begun:
            self._claimed.begin(item)
        return bool(ours)

    async def retire(self, streams: Sequence[str]) -> None:
        """Remove the worker's consumer from the streams if it holds nothing. Raises redis-py's errors."""
        await run_scripts(self._server, [scripts.retire(s, group=self._group, consumer=self._worker) for s in streams])
