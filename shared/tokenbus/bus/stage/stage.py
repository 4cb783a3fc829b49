"""Ordered stage: one live owner per partition, exactly-once commits, state rebuilt by replay.

A stage reads each partition it owns with plain XREAD from the committed offset, applies the entries to the partition's
pure `StageLogic`, and commits outputs and offset with one script. The logic's state is a function of the entries after
the low watermark, so a new owner replays them without output and continues where the previous owner stopped. Long open
runs are checkpointed with a commit from time to time, which keeps replays short.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from redis.exceptions import RedisError

from tokenbus.bus.keys import InternalTopic, Keys
from tokenbus.bus.liveness import Liveness, holding, slack
from tokenbus.bus.server.server import Server
from tokenbus.bus.stage.background_tasks import BackgroundTasks
from tokenbus.bus.stage.commit_replies import CommitReplies
from tokenbus.bus.stage.committer import AppliedBatch, Committer
from tokenbus.bus.stage.loading.owned_partitions import OwnedPartitions
from tokenbus.bus.stage.logic import FinishesReplay, StageLogic
from tokenbus.bus.stage.partition import Partition
from tokenbus.bus.stage.prepared_commit import AppliedEntries, PreparedCommit
from tokenbus.bus.stage.quarantine import CAREFUL_LOADS, TRIES_FIELD
from tokenbus.bus.stage.read_buffer import Batch
from tokenbus.bus.stage.stage_input import StageInput

__all__ = ["Batch", "Stage", "StageLogic"]

log = logging.getLogger(__name__)

CATCH_UP_READS = 4
SETTLING_S = 20.0
"""Maximum duration of `finish_replay`, plus a margin for the event loop."""
STRAGGLING_S = 0.05
"""How long the partitions of a Cluster wait for each other, so that their batches usually come from the same reads."""


class Stage:
    """One worker's share of an ordered stage. Call `open`, then `read` and `process` in a loop, then `close`."""

    def __init__(
        self,
        server: Server,
        keys: Keys,
        *,
        group: str,
        topic: InternalTopic,
        worker: str,
        logic: Callable[[int], StageLogic],
        downstream: str | None = None,
        lag_bytes: int = 8 * 2**20,
        lease_s: float = 3.0,
        tick_s: float = 0.25,
        max_records: int = 256,
        topic_entries: int = 50_000,
        dead_entries: int = 10_000,
        entries_read: bool = True,
        liveness: Liveness | None = None,
    ) -> None:
        """``downstream``: the group that reads the outputs. A partition is not read while ``downstream`` lags by more
        than ``lag_bytes`` in it. ``entries_read``: the server supports XGROUP SETID … ENTRIESREAD (Redis 7).
        """
        self._server = server
        self._keys = keys
        self._group = group
        self._liveness = liveness = liveness or Liveness()
        self._topic: InternalTopic = topic
        self._lease_s = lease_s
        self._is_cluster = server.topology == "cluster"
        """Partitions lie on different nodes (Cluster); a failing node must not block the others."""
        self._locks: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._background = BackgroundTasks(group, liveness)
        """Tasks of partitions that are processed apart (Cluster) or are in `finish_replay`."""
        self._commits = Committer(
            server,
            keys,
            group=group,
            topic=topic,
            lease_s=lease_s,
            topic_entries=topic_entries,
            dead_entries=dead_entries,
            entries_read=entries_read,
        )
        self._partitions = OwnedPartitions(
            server,
            keys,
            self._commits,
            group=group,
            topic=topic,
            worker=worker,
            logic=logic,
            lease_s=lease_s,
            tick_s=tick_s,
            liveness=liveness,
            lock_of=self.lock_of,
            on_change=self._wake,
        )
        self._parts = self._partitions.parts
        self._leases = self._partitions.leases
        self._replies = CommitReplies(
            self._partitions, self._commits, group=group, lag_bytes=lag_bytes, shun_s=2 * lease_s
        )
        self._input = StageInput(
            server,
            keys,
            self._parts,
            self._background,
            group=group,
            max_records=max_records,
            downstream=downstream,
            lag_bytes=lag_bytes,
            on_alien_key=self._partitions.block,
        )

    @property
    def owned(self) -> list[int]:
        """The partitions that this worker is processing."""
        return sorted(part.number for part in self._parts.values())

    @property
    def blocked(self) -> list[int]:
        """Partitions of this worker that wait because a shared key has the wrong type."""
        return self._partitions.blocked

    def token_of(self, partition: int) -> str | None:
        """Fencing token of this worker's writes to the partition; None if it does not own the partition."""
        lease = self._leases.owned.get(partition)
        return lease.token if lease else None

    @property
    def healthy(self) -> bool:
        """Whether the worker can reach the server."""
        return self._leases.healthy

    async def open(self) -> None:
        """Sign on and acquire a first share of the partitions. Raises redis-py's errors."""
        await self._leases.open()

    async def close(self) -> None:
        """Commit pending work, release the partitions at once, and stop reading.

        Takes no longer than a lease lasts; another worker processes what could not be committed by then.
        """
        await self._leases.close()
        loading = self._partitions.stop()
        self._commits.close()
        await asyncio.gather(self._background.close(), *loading, return_exceptions=True)
        await self._input.close()

    async def read(self, *, block_ms: int = 2000) -> list[Batch]:
        """Read a bounded round of new entries, shared fairly among partitions.

        Returns an empty list after ``block_ms`` or if the set of partitions changed. Raises redis-py's errors.
        """
        return await self._input.read(block_ms=block_ms)

    def _wake(self) -> None:
        self._input.wake()

    async def process(self, batches: Sequence[Batch]) -> None:
        """Process and commit the batches of `read`; returns once they are committed or their leases are lost.

        The same commit is retried while the server is unavailable and takes effect once, even if replies are lost. In a
        Cluster, a partition whose node is unavailable retries in the background and is not read until it has committed.
        """
        if self._is_cluster:
            tasks = [self._background.start(batch.partition, partial(self._process, [batch])) for batch in batches]
            if tasks:
                await asyncio.wait(tasks, timeout=STRAGGLING_S)
            for task in tasks:
                if not task.done():
                    task.add_done_callback(lambda _: self._input.wake())
            return
        await self._process(batches)

    # --- for a stage before this one in the same process (chain.py) -------------------------------------------------

    def lock_of(self, partition: int) -> asyncio.Lock:
        """Serializes work on the partition: one lock for all, or in a Cluster one per partition."""
        return self._locks[partition if self._is_cluster else 0]

    def ready_part(self, partition: int) -> Partition | None:
        """The partition, if this worker owns it and can process it now."""
        part = self._parts.get(self._keys.topic(partition, self._topic))
        return part if part and self._input.is_ready(part) and part.loads <= CAREFUL_LOADS else None

    def rest(self, partition: int, seconds: float) -> None:
        """Do not wait for entries of the partition for a while, another task is notified of them; 0: wait again."""
        self._input.rest(self._keys.topic(partition, self._topic), seconds)

    async def catch_up(self, partition: int) -> bool:
        """Process the entries that wait in the partition; whether none is left. Raises redis-py's errors."""
        for _ in range(CATCH_UP_READS):
            part = self.ready_part(partition)
            if part is None:
                return False
            begin = part.offset
            entries = await self._server.client.xrange(part.stream, f"({begin}", "+", count=self._input.count)
            if not entries:
                return self.ready_part(partition) is part and part.offset == begin
            await self._process([Batch(partition, begin, entries)])
        return False

    async def committed(self, part: Partition, work: PreparedCommit, reply: list[Any]) -> None:
        """Take the reply to a commit of this partition that another task sent, holding `lock_of`."""
        if self._parts.get(part.stream) is part:
            await self._replies.handle(part, work, reply)

    def reload(self, part: Partition) -> None:
        """Rebuild the partition under its lease: its state is ahead of the log. No effect if it is not owned now."""
        self._partitions.reload(part)

    # --- the batches of a round ---------------------------------------------------------------------------------

    async def _process(self, batches: Sequence[Batch]) -> None:
        async with holding(self.lock_of(batches[0].partition if batches else 0)):
            worked: list[AppliedBatch] = []
            with self._uncommitted(worked):
                for batch in batches:
                    part = self._parts.get(self._keys.topic(batch.partition, self._topic))
                    # The partition may have been dropped, and even reloaded, since the read.
                    if part is None or part.offset != batch.begin:
                        continue
                    taken = await self._commit_alone(part, batch) if part.loads > CAREFUL_LOADS else batch
                    if work := await self._work(part, taken):
                        worked.append(AppliedBatch(part, taken.begin, work))
            await self._submit(worked)

    async def _submit(self, worked: list[AppliedBatch]) -> None:
        """Commit the applied batches."""
        with self._uncommitted(worked):
            replies = await self._commits.submit(worked)
        for each, reply in zip(worked, replies, strict=True):
            await self._replies.handle(each.part, each.work, reply)

    @contextmanager
    def _uncommitted(self, worked: Sequence[AppliedBatch]) -> Generator[None]:
        """If the block raises, drop the partitions of these batches: their state is ahead of the last commit."""
        try:
            yield
        except BaseException:
            for each in worked:
                self._partitions.drop(each.part)
            raise

    # --- one batch --------------------------------------------------------------------------------------------

    async def _work(self, part: Partition, batch: Batch) -> PreparedCommit | None:
        first = batch.entries[0]
        with self._applying(part):
            if part.isolated.exhausted and part.isolated.entry_id == first[0].decode():
                return part.quarantine(
                    first, f"{part.loads - 1} tries did not commit: its workers died, or the stage raised"
                )
            taken = part.apply(batch.entries)
            if rest := batch.entries[len(taken.entries) :]:
                self._input.put_back(part, rest)
            logic = part.finishes_replay
            if logic and logic.replay_unfinished:
                if not self._is_cluster:
                    task = self._background.start(part.number, partial(self._finish, part, logic, batch, taken))
                    task.add_done_callback(lambda _: self._input.wake())
                    return None
                with slack(SETTLING_S):
                    await logic.finish_replay()
            return part.build_commit(taken)
        return None

    async def _finish(self, part: Partition, logic: FinishesReplay, batch: Batch, taken: AppliedEntries) -> None:
        """Run `finish_replay` and commit one batch in the background. The partition is not read meanwhile and may be
        revoked.
        """
        with self._applying(part, passes=(RedisError, OSError)):
            with slack(SETTLING_S):
                await logic.finish_replay()
            async with holding(self.lock_of(part.number)):
                if self._parts.get(part.stream) is part:
                    await self._submit([AppliedBatch(part, batch.begin, part.build_commit(taken))])

    @contextmanager
    def _applying(self, part: Partition, *, passes: tuple[type[Exception], ...] = ()) -> Generator[None]:
        """If the logic raises, log it and drop the partition for a while. If the block is cancelled, in
        `finish_replay`, drop it too: it has applied entries that are not committed. ``passes``: errors to let through.
        """
        try:
            yield
        except passes:
            raise
        except Exception:
            log.exception("%s partition %d: the logic failed", self._group, part.number)
            self._partitions.drop(part, shun_s=2 * self._lease_s)
        except BaseException:
            self._partitions.drop(part)
            raise

    async def _commit_alone(self, part: Partition, batch: Batch) -> Batch:
        """Take the first entry alone, and record it before trying in case it crashes this worker."""
        first = batch.entries[:1]
        part.isolated = part.isolated.after(first[0][0].decode())
        await self._commits.note(part, TRIES_FIELD, part.isolated.stored())
        return Batch(batch.partition, batch.begin, first)
