"""Who owns which partition of a group: leases with fencing tokens, shared out fairly among the live workers.

Each worker signs on in the group's member set and counts who else did. Ranked by name, the first ``P mod M``
of M workers are due ``P div M + 1`` partitions, the others ``P div M``. A worker gives up what it holds beyond
its share and takes free leases below it; nobody takes a lease that is held. A dead worker's sign of life and
its leases run out together after ``ttl_ms``, so that it is followed within that and one tick.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import msgspec
from redis.exceptions import RedisError

from tokenbus.bus import scripts
from tokenbus.bus.keys import InternalTopic, Keys, PublicTopic
from tokenbus.bus.send import send, send_many
from tokenbus.bus.server import Server


class Lease(msgspec.Struct, frozen=True):
    """One partition held: the token that fences its writes, and where its predecessor got to."""

    partition: int
    token: int
    offset: str
    watermark: str


def share_of(worker: str, workers: list[str], partitions: int) -> int:
    """How many partitions this worker is due; a worker that is not in the list is due none."""
    ranked = sorted(workers)
    if worker not in ranked:
        return 0
    each, rest = divmod(partitions, len(ranked))
    return each + (ranked.index(worker) < rest)


class Leases:
    """Holds a fair share of a group's partitions for one worker, until `close`.

    ``taken`` is called with each new lease and must not wait: what takes long (a replay) it starts. ``gone`` is
    awaited with each partition that was lost or is about to be given up, before it is released, so that a
    batch in hand is committed first.
    """

    def __init__(
        self,
        server: Server,
        keys: Keys,
        *,
        group: str,
        topic: InternalTopic | PublicTopic,
        worker: str,
        taken: Callable[[Lease], None],
        gone: Callable[[int], Awaitable[None]],
        ttl_s: float = 3.0,
        tick_s: float = 0.25,
        start: str = "0-0",
        mirror: bool = True,
    ) -> None:
        self._server = server
        self._keys = keys
        self._group = group
        self._topic: InternalTopic | PublicTopic = topic
        self._worker = worker
        self._taken = taken
        self._gone = gone
        self._ttl_ms = int(ttl_s * 1000)
        self._tick_s = tick_s
        self._start = start
        self._mirror = group if mirror else ""
        self._held: dict[int, Lease] = {}
        self._due_for_renewal = 0.0
        self._ticked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def held(self) -> dict[int, Lease]:
        """The leases held now, by partition."""
        return self._held

    @property
    def healthy(self) -> bool:
        """Whether the last tick reached the server."""
        return self._ticked.is_set()

    async def open(self) -> None:
        """Start to take part; returns after the first tick, with leases where any were free. Raises what redis-py raises."""
        await self._tick()
        self._ticked.set()
        self._task = asyncio.create_task(self._run(), name=f"leases {self._group}")

    async def close(self) -> None:
        """Give up all leases at once and sign off, so that others need not wait for an expiry."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        try:
            await self._server.client.zrem(self._keys.members(self._group), self._worker)
            await self._give_up(list(self._held))
        except (RedisError, OSError):
            self._held.clear()  # the server is gone: the leases expire by themselves

    def forget(self, partition: int) -> None:
        """A commit found the lease fenced: it is another's by now. It may be taken again later."""
        self._held.pop(partition, None)

    async def _run(self) -> None:
        while True:
            # The jitter keeps workers that started together from asking together for ever.
            await asyncio.sleep(self._tick_s * random.uniform(0.8, 1.2))
            try:
                await self._tick()
                self._ticked.set()
            except (RedisError, OSError):
                self._ticked.clear()  # next tick tries again; an expired lease is found by its token

    async def _tick(self) -> None:
        now = asyncio.get_running_loop().time()
        found: list[bytes] = await send(
            self._server,
            scripts.present(self._keys.members(self._group), member=self._worker, ttl_ms=self._ttl_ms),
        )
        due = share_of(self._worker, [m.decode() for m in found], self._keys.partitions)
        if now >= self._due_for_renewal:
            await self._renew()
            self._due_for_renewal = now + self._ttl_ms / 3000
        if len(self._held) > due:
            await self._give_up(sorted(self._held)[due:])
        elif len(self._held) < due:
            await self._take(due - len(self._held))

    async def _renew(self) -> None:
        held = list(self._held.values())
        if not held:
            return
        calls = [
            scripts.renew(self._lease_key(lease.partition), self._stream(lease.partition), token=lease.token, ttl_ms=self._ttl_ms)
            for lease in held
        ]
        for lease, kept in zip(held, await send_many(self._server, calls), strict=True):
            if not kept and self._held.get(lease.partition) is lease:
                self.forget(lease.partition)
                await self._gone(lease.partition)

    async def _take(self, wanted: int) -> None:
        free = [p for p in range(self._keys.partitions) if p not in self._held]
        random.shuffle(free)  # so that several newcomers do not all ask for the same ones
        for partition in free:
            if wanted <= 0:
                return
            token, offset, watermark, _ = await send(
                self._server,
                scripts.acquire(
                    self._lease_key(partition),
                    self._stream(partition),
                    owner=self._worker,
                    ttl_ms=self._ttl_ms,
                    start=self._start,
                    mirror=self._mirror,
                ),
            )
            if not token:
                continue
            lease = Lease(partition, token, offset.decode(), watermark.decode())
            self._held[partition] = lease
            wanted -= 1
            self._taken(lease)

    async def _give_up(self, partitions: list[int]) -> None:
        for partition in partitions:
            lease = self._held.pop(partition)
            await self._gone(partition)
            await send(self._server, scripts.release(self._lease_key(partition), token=lease.token))

    def _lease_key(self, partition: int) -> str:
        return self._keys.lease(partition, self._group)

    def _stream(self, partition: int) -> str:
        return self._keys.topic(partition, self._topic)
