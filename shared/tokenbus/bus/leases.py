"""Partition ownership in a group: leases with fencing tokens, shared fairly among the live workers.

Each worker signs on in the group's member set and reads who else has. With P partitions and M workers ranked by name,
the first ``P mod M`` workers are due ``P div M + 1`` partitions, the others ``P div M``. A worker releases leases
beyond its share and acquires free ones below it; it never acquires a lease that is held. A dead worker's membership and
its leases both expire after ``ttl_ms``, so its partitions are acquired within that time and one tick.

A Cluster node that does not answer blocks only the requests to that node; leases on other nodes are renewed and
acquired meanwhile. The member set is on one node. While that node is unavailable, no partition changes hands.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import msgspec
from redis.exceptions import RedisError

from tokenbus.bus import scripts
from tokenbus.bus.keys import InternalTopic, Keys, SubscribedTopic
from tokenbus.bus.liveness import Liveness, beat
from tokenbus.bus.server.retry import Defects, retry_until_available
from tokenbus.bus.server.run_scripts import run_each, run_script, run_scripts
from tokenbus.bus.server.server import Server
from tokenbus.bus.server.stream_reader import id_key

log = logging.getLogger(__name__)

BLOCKED_S = 1.0
"""Retry interval for a partition with a key of the wrong type."""
LAG_FIELDS = ("arrived", "done")
"""Counters in the lease hash of a stage's group: bytes that arrived in the partition, to which every writer adds, and
those that the stage's commits have processed. The scripts in `bus/scripts` contain the names as literals.
"""


class Lease(msgspec.Struct, frozen=True):
    """An owned partition: the token that fences its writes, and the previous owner's offset, watermark and token."""

    partition: int
    token: str
    offset: str
    watermark: str
    before: str = ""


def partition_share(worker: str, workers: list[str], partitions: int) -> int:
    """Number of partitions that this worker is due; 0 if the worker is not in the list."""
    ranked = sorted(workers)
    if worker not in ranked:
        return 0
    each, rest = divmod(partitions, len(ranked))
    return each + (ranked.index(worker) < rest)


def lag_of(arrived: bytes | None, done: bytes | None) -> int:
    """The lag of a stage in one partition in bytes, from the values of `LAG_FIELDS`. Never below 0, although a
    fail-over may lose ``arrived``.
    """
    return max(0, int(arrived or 0) - int(done or 0))


async def wait_until_replicated(server: Server, keys: Keys, partition: int) -> None:
    """Wait until all that the partition has is where the server's `Durability` says. Raises redis-py's errors;
    NotReplicated if that takes long.
    """
    fence = scripts.note(keys.lease(partition, "parser"), field="replicated_ms", value=server.clock.now_ms())
    await run_script(server, msgspec.structs.replace(fence, durable=True))


async def read_lag(client: Any, lease_key: str) -> int:
    """The lag of the group with this lease hash. Raises redis-py's errors."""
    return lag_of(*await client.hmget(lease_key, LAG_FIELDS))


async def first_error(requests: Sequence[asyncio.Task[Exception | None]], patience_s: float) -> Exception | None:
    """Wait up to ``patience_s`` for the answers; return the first error, or TimeoutError if some are still pending."""
    if not requests:
        return None
    done, late = await asyncio.wait(requests, timeout=patience_s)
    return next((error for task in done if (error := task.result())), TimeoutError() if late else None)


class Leases:
    """Keeps a fair share of a group's partitions for one worker until `close`.

    ``on_acquired`` is called with each new lease. It must not block; it starts long work, such as a replay, as a task.
    ``on_revoked`` is awaited with each partition that was lost or is about to be released, before the release, so that
    the pending batch is committed first. ``on_rollback`` is awaited with a partition and the server's offset if that
    offset is before one reported with `committed`: the server lost writes in a fail-over. ``start``: where a group that
    has no offset yet begins to read.
    """

    def __init__(
        self,
        server: Server,
        keys: Keys,
        *,
        group: str,
        topic: InternalTopic | SubscribedTopic,
        worker: str,
        on_acquired: Callable[[Lease], None],
        on_revoked: Callable[[int], Awaitable[None]],
        ttl_s: float = 3.0,
        tick_s: float = 0.25,
        on_rollback: Callable[[int, str], Awaitable[None]] | None = None,
        start: str = "0-0",
        liveness: Liveness | None = None,
    ) -> None:
        self._server = server
        self._keys = keys
        self._group = group
        self._topic: InternalTopic | SubscribedTopic = topic
        self._worker = worker
        self._start = start
        self._partitions_at_start = keys.partitions
        self._on_acquired = on_acquired
        self._on_revoked = on_revoked
        self._on_rollback = on_rollback
        self._ttl_s = ttl_s
        self._tick_s = tick_s
        self._liveness = liveness or Liveness()
        self._owned: dict[int, Lease] = {}
        self._committed: dict[int, str] = {}
        self._avoid_until: dict[int, float] = {}
        """Partition -> time until which this worker does not acquire it."""
        self.blocked: set[int] = set()
        """Partitions whose lease hash or stream has the wrong type."""
        self._renew_at: dict[int, float] = {}
        self._requests: dict[int, asyncio.Task[Exception | None]] = {}
        """Pending requests by partition."""
        self._unanswered: set[int] = set()
        """Partitions whose server failed to answer the last request."""
        self._counted: asyncio.Task[list[str]] | None = None
        """Pending request for the members."""
        self._healthy = False
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def owned(self) -> dict[int, Lease]:
        """Leases owned now, by partition."""
        return self._owned

    @property
    def healthy(self) -> bool:
        """Whether the last tick reached the server and no owned lease has expired."""
        now = asyncio.get_running_loop().time()
        return self._healthy and all(self._renew_at[p] + self._ttl_s * 2 / 3 > now for p in self._owned)

    async def open(self) -> None:
        """Start taking part; returns with leases if any were free. Raises redis-py's errors."""
        error = await self._share(await self._count(), patience_s=self._ttl_s)
        if error and not self._owned:
            await self._await_answers()
            raise error
        self._healthy = True
        self._task = self._liveness.start(self._run(), name=f"leases {self._group}")

    def check(self) -> None:
        """Raise the error that ended the leases' task, if it ended unexpectedly: no lease is renewed or acquired any
        more."""
        if self._task and self._task.done() and not self._closing.is_set():
            self._task.result()

    async def close(self) -> None:
        """Release all leases and sign off, so that other workers need not wait for them to expire.

        Takes no longer than a lease lasts; if the server is unavailable, the leases expire.
        """
        self._closing.set()
        if self._task:
            self._liveness.expect_end(self._task)
        try:
            async with asyncio.timeout(self._ttl_s):
                if self._task:
                    await asyncio.wait({self._task})
                await self._await_answers()
                # Retry: if a broken connection loses the sign-off, the other workers wait for the leases to expire.
                what = f"sign-off from {self._group}"
                await retry_until_available(self._server, self._sign_off, what=what)
                leases = await self._release_surplus(list(self._owned))
                await retry_until_available(self._server, lambda: self._release(leases), what=what)
        except (RedisError, OSError, TimeoutError) as e:
            log.warning("leases of %s: left to run out: %s", self._group, str(e) or type(e).__name__)
            self._owned.clear()

    async def _await_answers(self) -> None:
        """Wait for pending requests; a cancelled one might acquire leases unnoticed. The wait is bounded so that leases
        on the other nodes of a Cluster can still be released.
        """
        pending: set[asyncio.Task[Any]] = set(self._requests.values())
        if self._counted:
            pending.add(self._counted)
        if pending:
            _, late = await asyncio.wait(pending, timeout=self._ttl_s / 2)
            for task in late:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    def committed(self, partition: int, offset: str) -> None:
        """Record the offset of the owner's last commit."""
        self._committed[partition] = offset

    def forget(self, partition: int, *, retry_s: float = 0.0) -> None:
        """Drop a lease that is lost or whose partition cannot be processed. This worker may acquire it again after
        ``retry_s``.
        """
        self._owned.pop(partition, None)
        if retry_s:
            self._avoid_until[partition] = asyncio.get_running_loop().time() + retry_s

    async def _run(self) -> None:
        defects = Defects()
        while not await self._wait_for_tick():
            beat()
            if self._liveness.failed:
                return
            try:
                await self._tick()
                self._healthy = True
                defects.none()
            except (RedisError, OSError) as e:
                if self._healthy:
                    log.warning("leases of %s: the server is unavailable: %s", self._group, e)
                self._healthy = False
                self._back_off(range(self._keys.partitions))
            except Exception as e:
                self._healthy = False
                log.exception("tick of %s", self._group)
                defects.count(e)

    def _back_off(self, partitions: Iterable[int]) -> None:
        """The leases on this server may have expired while it was unavailable; give each owner time to renew before
        acquiring any.
        """
        until = asyncio.get_running_loop().time() + 3 * self._tick_s
        for partition in partitions:
            self._avoid_until[partition] = max(until, self._avoid_until.get(partition, 0.0))
            self._renew_at[partition] = 0.0

    # --- requests about partitions, at most one for each, in tasks of their own -------------------------------------
    #
    # In a Cluster there is one request for each partition, so that a node that does not answer delays its own
    # partitions alone. Elsewhere one request is about all partitions.

    def _groups(self, partitions: Iterable[int]) -> list[list[int]]:
        """The partitions without a pending request, grouped if they are known to be on one node."""
        free = [p for p in partitions if p not in self._requests]
        return [[p] for p in free] if self._server.topology == "cluster" else [free] if free else []

    def _send(
        self, partitions: list[int], request: Callable[[list[int]], Awaitable[None]]
    ) -> asyncio.Task[Exception | None]:
        """Send the request about these partitions, which have none. The task returns its error, if any."""
        name = f"answer {self._group} {partitions}"
        task = self._liveness.start_passing(self._answer(partitions, request), name=name)
        self._requests |= dict.fromkeys(partitions, task)
        return task

    async def _answer(self, partitions: list[int], request: Callable[[list[int]], Awaitable[None]]) -> Exception | None:
        try:
            await request(partitions)
            self._unanswered.difference_update(partitions)
        except (RedisError, OSError) as e:
            if self._healthy and not self._unanswered.issuperset(partitions):
                problem = str(e) or type(e).__name__
                log.warning("leases of %s: no answer about %s: %s", self._group, partitions, problem)
            self._unanswered.update(partitions)
            self._back_off(partitions if self._server.topology == "cluster" else range(self._keys.partitions))
            return e
        except Exception as e:
            log.exception("leases of %s", self._group)
            return e
        finally:
            for partition in partitions:
                del self._requests[partition]
        return None

    async def _wait_for_tick(self) -> bool:
        """True: closing, no further tick. The jitter keeps workers that started together from asking at the same
        time.
        """
        try:
            async with asyncio.timeout(self._tick_s * random.uniform(0.8, 1.2)):
                return await self._closing.wait()
        except TimeoutError:
            return False

    async def _tick(self) -> None:
        now = asyncio.get_running_loop().time()
        # Supervised: if it stalled, this worker would keep its partitions, and never release or acquire any.
        name = f"members of {self._group}"
        self._counted = self._counted or self._liveness.start_passing(self._count(), name=name)
        requests = [
            self._send(group, self._renew)
            for group in self._groups(self._owned)
            if any(self._renew_at[p] <= now for p in group)
        ]
        await asyncio.wait([self._counted, *requests], timeout=self._tick_s)
        if self._counted.done():
            counted, self._counted = self._counted, None
            await self._share(counted.result(), patience_s=self._tick_s)

    async def _count(self) -> list[str]:
        """Sign on; return all members."""
        clock = asyncio.get_running_loop().time
        asked_at = clock()
        present = scripts.present(
            self._keys.members(self._group), member=self._worker, ttl_ms=round(self._ttl_s * 1000)
        )
        members: list[bytes] = await run_script(self._server, present)
        if clock() - asked_at > self._ttl_s / 2:
            self._back_off(range(self._keys.partitions))
        return [member.decode() for member in members]

    async def _share(self, members: list[str], *, patience_s: float) -> Exception | None:
        """Release or acquire leases to reach the fair share; return the first error among the timely replies."""
        due = partition_share(self._worker, members, self._keys.partitions)
        if len(self._owned) > due:
            surplus = self._groups(sorted(self._owned)[due:])
            return await first_error([self._send(group, self._revoke_expired) for group in surplus], patience_s)
        now = asyncio.get_running_loop().time()
        self._avoid_until = {p: until for p, until in self._avoid_until.items() if until > now}
        free = [p for p in range(self._keys.partitions) if p not in self._owned and p not in self._avoid_until]
        random.shuffle(free)  # so that several new workers do not all ask for the same ones
        error = None
        while (wanted := due - len(self._owned)) > 0 and free and not error:
            requests = [self._send(group, self._acquire) for group in self._groups(free[:wanted])]
            free = free[wanted:]
            error = await first_error(requests, patience_s)
        return error

    async def _renew(self, partitions: list[int]) -> None:
        held = [self._owned[partition] for partition in partitions if partition in self._owned]
        committed = dict(self._committed)
        renew_at = self._next_renewal()
        ttl_ms = round(self._ttl_s * 1000)
        calls = [scripts.renew(*self._keys_of(each.partition), token=each.token, ttl_ms=ttl_ms) for each in held]
        for lease, reply in zip(held, await run_each(self._server, calls), strict=True):
            if self._owned.get(lease.partition) is not lease:
                continue
            if isinstance(reply, Exception):
                self._block(lease.partition, reply)
                await self._on_revoked(lease.partition)
                continue
            self._renew_at[lease.partition] = renew_at
            if not reply:  # it is lost
                self.forget(lease.partition)
                await self._on_revoked(lease.partition)
                continue
            offset: str = reply.decode()
            if self._on_rollback and id_key(offset) < id_key(committed.get(lease.partition, "0-0")):
                await self._on_rollback(lease.partition, offset)

    async def _acquire(self, partitions: list[int]) -> None:
        renew_at = self._next_renewal()
        calls = [self._acquiring(partition) for partition in partitions]
        for partition, reply in zip(partitions, await run_each(self._server, calls), strict=True):
            if isinstance(reply, Exception):
                self._block(partition, reply)
            elif lease := self._acquired(partition, reply, renew_at):
                self.blocked.discard(partition)
                self._on_acquired(lease)

    async def acquire_again(self, partition: int) -> Lease | None:
        """Take a new token for a lease of this worker: commands under the last one that are still on their way to the
        server write nothing after this. None: another worker has the lease. Raises redis-py's errors.
        """
        renew_at = self._next_renewal()
        reply = await run_script(self._server, self._acquiring(partition))
        return self._acquired(partition, reply, renew_at)

    def _acquiring(self, partition: int) -> scripts.ScriptCall:
        return scripts.acquire(
            *self._keys_of(partition),
            owner=self._worker,
            ttl_ms=round(self._ttl_s * 1000),
            # Partitions that are added later are read from their beginning.
            start=self._start if partition < self._partitions_at_start else "0-0",
            mirror=self._group,
        )

    def _acquired(self, partition: int, reply: list[bytes], renew_at: float) -> Lease | None:
        if not reply[0]:  # another worker owns it
            return None
        token, offset, watermark, before = reply
        lease = Lease(partition, token.decode(), offset.decode(), watermark.decode(), before.decode())
        self._owned[partition] = lease
        self._renew_at[partition] = renew_at
        self._committed[partition] = lease.offset
        return lease

    def _block(self, partition: int, error: Exception) -> None:
        """Stop using a partition whose lease hash or stream has the wrong type, until an operator repairs it."""
        self.forget(partition, retry_s=BLOCKED_S)
        if partition not in self.blocked:
            keys = " or ".join(self._keys_of(partition))
            log.error(
                "%s partition %d waits: %s has the wrong type, delete or rename it: %s",
                self._group,
                partition,
                keys,
                error,
            )
        self.blocked.add(partition)

    async def _revoke_expired(self, partitions: list[int]) -> None:
        await self._release(await self._release_surplus(partitions))

    async def _release_surplus(self, partitions: list[int]) -> list[Lease]:
        leases = [self._owned.pop(partition) for partition in partitions if partition in self._owned]
        for lease in leases:
            await self._on_revoked(lease.partition)
        return leases

    def _next_renewal(self) -> float:
        """When a lease that is requested now must be renewed."""
        return asyncio.get_running_loop().time() + self._ttl_s / 3

    async def _release(self, leases: Sequence[Lease]) -> None:
        """Release these leases on the server. Does nothing for one that is lost. Raises redis-py's errors."""
        calls = [scripts.release(self._keys_of(lease.partition)[0], token=lease.token) for lease in leases]
        await run_scripts(self._server, calls)

    async def _sign_off(self) -> None:
        await self._server.client.zrem(self._keys.members(self._group), self._worker)

    def _keys_of(self, partition: int) -> tuple[str, str]:
        """The keys of a partition's lease and of the stream that the group reads."""
        return self._keys.lease(partition, self._group), self._keys.topic(partition, self._topic)
