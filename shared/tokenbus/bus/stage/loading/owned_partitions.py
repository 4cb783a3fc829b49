"""The partitions of one worker in a stage: loaded when their lease is acquired, dropped when it is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from tokenbus.bus.keys import InternalTopic, Keys
from tokenbus.bus.leases.lease import Lease
from tokenbus.bus.leases.leases import Leases
from tokenbus.bus.liveness import Liveness, holding, stop_task
from tokenbus.bus.server.error_replies import is_alien
from tokenbus.bus.server.server import Server
from tokenbus.bus.stage.commit_journal import LOST_WRITES, CommitJournal
from tokenbus.bus.stage.committer import Committer
from tokenbus.bus.stage.loading.partition_loader import PartitionLoader
from tokenbus.bus.stage.loading.rollback import repair_commit
from tokenbus.bus.stage.logic import StageLogic
from tokenbus.bus.stage.partition import Partition

log = logging.getLogger(__name__)

BLOCKED_S = 1.0
"""Retry interval for a partition with a shared key of the wrong type."""


class OwnedPartitions:
    """What a worker has of its leases: the state of each partition in memory, and the journal of its commits."""

    def __init__(
        self,
        server: Server,
        keys: Keys,
        commits: Committer,
        *,
        group: str,
        topic: InternalTopic,
        worker: str,
        logic: Callable[[int], StageLogic],
        lease_s: float,
        tick_s: float,
        liveness: Liveness,
        lock_of: Callable[[int], asyncio.Lock],
        on_change: Callable[[], None],
    ) -> None:
        """``lock_of``: serializes work on a partition. ``on_change``: called when a partition was loaded or dropped."""
        self._keys = keys
        self._group = group
        self._topic: InternalTopic = topic
        self._liveness = liveness
        self._lease_s = lease_s
        self._commits = commits
        self._lock_of = lock_of
        self._on_change = on_change
        self._closed = False
        self._loading: dict[int, asyncio.Task[None]] = {}
        self.parts: dict[str, Partition] = {}
        """Loaded partitions by stream."""
        self.journals: dict[int, CommitJournal] = {}
        """Journal by partition."""
        self.blocked_keys: set[int] = set()
        """Partitions that wait because a key of theirs has the wrong type; see `blocked`."""
        self._loader = PartitionLoader(server, keys, commits, group=group, topic=topic, logic=logic)
        self.leases = Leases(
            server,
            keys,
            group=group,
            topic=topic,
            worker=worker,
            on_acquired=self._on_acquired,
            on_revoked=self._on_revoked,
            on_rollback=self._on_rollback,
            ttl_s=lease_s,
            tick_s=tick_s,
            liveness=liveness,
        )

    @property
    def blocked(self) -> list[int]:
        """Partitions of this worker that wait because a shared key has the wrong type."""
        return sorted(self.blocked_keys | self.leases.blocked)

    def stop(self) -> list[asyncio.Task[None]]:
        """Forget all partitions and cancel what is loading; returns those tasks, to be awaited. Close the leases
        before.
        """
        self._closed = True
        self.parts.clear()
        loading = [*self._loading.values()]
        for task in loading:
            task.cancel()
        return loading

    def _on_acquired(self, lease: Lease) -> None:
        task = self._liveness.start_passing(self._load(lease), name=f"replay {self._group} {lease.partition}")
        self._loading[lease.partition] = task

    async def _on_revoked(self, partition: int) -> None:
        if loading := self._loading.pop(partition, None):
            await stop_task(loading)
            if not self._liveness.failed:  # the replay may be what this worker failed at
                await self._loader.withdraw(partition)
        async with holding(self._lock_of(partition)):
            self._remove(partition)

    def drop(self, part: Partition, *, shun_s: float = 0.0) -> None:
        """Forget the partition so that it is reloaded, here or elsewhere. No effect if that has happened already."""
        if self.parts.get(part.stream) is not part:
            return
        self.leases.forget(part.number, shun_s=shun_s)
        self._remove(part.number)

    def _remove(self, partition: int) -> None:
        if self.parts.pop(self._keys.topic(partition, self._topic), None):
            del self.journals[partition]
            self._on_change()

    async def _load(self, lease: Lease, journal: CommitJournal | None = None) -> None:
        """Rebuild the partition's state, then start reading it."""
        try:
            part = await self._loader.load(lease)
        except Exception as e:
            if self._closed:
                return
            if is_alien(e):
                await self._await_mending(lease.partition, e)
            else:
                # Another worker may succeed once the lease has expired. Tries are bounded: see `PartitionLoader`.
                log.exception("replay of partition %d of %s failed", lease.partition, self._group)
                self._liveness.failed_work(f"replay {self._group}")
                self.leases.forget(lease.partition, shun_s=2 * self._lease_s)
            return
        finally:
            self._loading.pop(lease.partition, None)
        self.parts[part.stream] = part
        kept = journal is not None and journal.offset == part.offset
        self.journals[part.number] = journal if journal and kept else CommitJournal(part.offset)
        self._on_change()

    # --- partitions that wait, and that are loaded again ---------------------------------------------------------

    def block(self, part: Partition, why: str) -> None:
        """Pause a partition whose shared key has the wrong type. No entry is at fault, and the other partitions
        continue.
        """
        self._say_blocked(part.number, why)
        self.drop(part, shun_s=BLOCKED_S)

    def _say_blocked(self, partition: int, why: str) -> None:
        if partition not in self.blocked_keys:
            log.error(
                "%s partition %d waits until its key is fixed (delete or rename it): %s", self._group, partition, why
            )
        self.blocked_keys.add(partition)

    async def _await_mending(self, partition: int, error: Exception) -> None:
        """`block` a partition that cannot be loaded. Its state is not at fault, so the tries do not count."""
        self._say_blocked(partition, str(error))
        self.leases.forget(partition, shun_s=BLOCKED_S)
        await self._loader.reset_replays(partition)

    def reload(self, part: Partition) -> None:
        """Rebuild the partition under its lease: its state is ahead of the log. No effect if it is not owned now."""
        lease = self.leases.owned.get(part.number)
        if self.parts.get(part.stream) is not part or lease is None or lease.token != part.token:
            self.drop(part)
            return
        journal = self.journals[part.number]
        self._remove(part.number)
        load = self._load_again(part, journal)
        self._loading[part.number] = self._liveness.start_passing(load, name=f"replay {self._group} {part.number}")

    async def _load_again(self, part: Partition, journal: CommitJournal) -> None:
        try:
            lease = await self._loader.position(part)
        except Exception:
            log.exception("replay of %s of partition %d failed", self._group, part.number)
            self.leases.forget(part.number, shun_s=2 * self._lease_s)
            self._loading.pop(part.number, None)
            return
        await self._load(lease, journal)

    # --- a fail-over that lost writes ---------------------------------------------------------------------------

    async def _on_rollback(self, partition: int, offset: str) -> None:
        async with holding(self._lock_of(partition)):
            part = self.parts.get(self._keys.topic(partition, self._topic))
            if part and self.journals[partition].is_ahead_of(offset):
                try:
                    await self.recover_rollback(part)
                finally:
                    self.drop(part)

    async def recover_rollback(self, part: Partition) -> None:
        """End the runs whose readers saw more events than the server has now; publish those events with their old
        numbers.
        """
        lease = await self._loader.position(part, stop_if=self._is_closed)
        log.error("%s partition %d: a fail-over lost the entries after %s", self._group, part.number, lease.offset)
        if not (lost := self.journals[part.number].after(lease.offset)):
            return
        past = await self._loader.rebuilt(lease, stop_if=self._is_closed)
        if commit := repair_commit(past, lost, LOST_WRITES):
            await self._commits.recover_rollback(part, lease, commit)

    def _is_closed(self) -> bool:
        return self._closed
