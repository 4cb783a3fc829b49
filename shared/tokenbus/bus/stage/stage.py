"""Ordered stage: one live owner per partition, exactly-once commits, state rebuilt by replay.

A stage reads each partition it owns with plain XREAD from the committed offset, applies the entries to the partition's
pure `StageLogic`, and commits outputs and offset with one script. The logic's state is a function of the entries after
the low watermark, so a new owner replays them without output and continues where the previous owner stopped. Long open
runs are checkpointed with a commit from time to time, which keeps replays short.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from redis.exceptions import RedisError

from tokenbus.bus.keys import Keys
from tokenbus.bus.liveness import Liveness, holding, slack
from tokenbus.bus.server.server import Server
from tokenbus.bus.server.stream_reader import Entry
from tokenbus.bus.stage.commits import Commits, StageOptions
from tokenbus.bus.stage.input import Batch, Input
from tokenbus.bus.stage.logic import StageLogic
from tokenbus.bus.stage.partition import CAREFUL_LOADS, TRIES_FIELD, AppliedBatch, Partition
from tokenbus.bus.stage.partitions import Partitions

__all__ = ["Batch", "Stage", "StageLogic", "StageOptions"]

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
        options: StageOptions,
        logic: Callable[[int], StageLogic],
        *,
        liveness: Liveness | None = None,
    ) -> None:
        """``logic``: makes that of a partition."""
        self.options = options
        self._server = server
        self._keys = keys
        self._is_cluster = server.topology == "cluster"
        """Partitions lie on different nodes (Cluster); a failing node must not block the others."""
        self._commits = Commits(server, keys, options)
        self._partitions = Partitions(server, keys, options, self._commits, logic, liveness=liveness or Liveness())
        self._input = Input(server, keys, options, self._partitions)
        self.lock_of = self._partitions.lock_of
        self.reload = self._partitions.reload

    @property
    def owned(self) -> list[int]:
        """The partitions that this worker is processing."""
        return sorted(part.number for part in self._partitions.parts.values())

    @property
    def blocked(self) -> list[int]:
        """Partitions of this worker that wait because a shared key has the wrong type."""
        return self._partitions.blocked

    def token_of(self, partition: int) -> str | None:
        """Fencing token of this worker's writes to the partition; None if it does not own the partition."""
        lease = self._partitions.leases.owned.get(partition)
        return lease.token if lease else None

    @property
    def healthy(self) -> bool:
        """Whether the worker can reach the server."""
        return self._partitions.leases.healthy

    async def open(self) -> None:
        """Sign on and acquire a first share of the partitions. Raises redis-py's errors."""
        await self._partitions.leases.open()

    async def close(self) -> None:
        """Commit pending work, release the partitions at once, and stop reading.

        Takes no longer than a lease lasts; another worker processes what could not be committed by then.
        """
        await self._partitions.leases.close()
        self._commits.close()
        await self._partitions.close()
        await self._input.close()

    async def read(self, *, block_ms: int = 2000) -> list[Batch]:
        """Read a bounded round of new entries, shared fairly among partitions.

        Returns an empty list after ``block_ms`` or if the set of partitions changed. Raises redis-py's errors.
        """
        return await self._input.read(block_ms=block_ms)

    async def process(self, batches: Sequence[Batch]) -> None:
        """Process and commit the batches of `read`; returns once they are committed or their leases are lost.

        The same commit is retried while the server is unavailable and takes effect once, even if replies are lost. In a
        Cluster, a partition whose node is unavailable retries in the background and is not read until it has committed.
        """
        if not self._is_cluster:
            await self._process(batches)
            return
        start = self._partitions.start
        if tasks := [start(batch.partition, partial(self._process, [batch])) for batch in batches]:
            await asyncio.wait(tasks, timeout=STRAGGLING_S)
        for task in tasks:
            if not task.done():
                task.add_done_callback(lambda _: self._input.wake())

    # --- for a stage before this one in the same process (chain.py) -------------------------------------------------

    def ready_part(self, partition: int) -> Partition | None:
        """The partition, if this worker owns it and can process it now."""
        part = self._partitions.get(partition)
        return part if part and self._partitions.is_ready(part) and part.loads <= CAREFUL_LOADS else None

    def rest(self, partition: int, seconds: float) -> None:
        """Do not wait for entries of the partition for a while, another task is notified of them; 0: wait again."""
        self._input.rest(self._keys.topic(partition, self.options.topic), seconds)

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

    async def committed(self, part: Partition, batch: AppliedBatch, reply: list[Any]) -> None:
        """Take the reply to a commit of this partition that another task sent, holding `lock_of`."""
        if self._partitions.get(part.number) is part:
            await self._partitions.committed(part, batch, reply)

    # --- the batches of a round ---------------------------------------------------------------------------------

    async def _process(self, batches: Sequence[Batch]) -> None:
        async with holding(self.lock_of(batches[0].partition if batches else 0)):
            applied: list[tuple[Partition, AppliedBatch]] = []
            with self._uncommitted(applied):
                for batch in batches:
                    part = self._partitions.get(batch.partition)
                    # The partition may have been dropped, and even reloaded, since the read.
                    if part is None or part.offset != batch.begin:
                        continue
                    entries = batch.entries if part.loads <= CAREFUL_LOADS else await self._first_alone(part, batch)
                    if work := await self._apply(part, entries):
                        applied.append((part, work))
            await self._submit(applied)

    async def _submit(self, applied: list[tuple[Partition, AppliedBatch]]) -> None:
        """Commit the applied batches."""
        with self._uncommitted(applied):
            replies = await self._commits.submit(applied)
        for (part, batch), reply in zip(applied, replies, strict=True):
            await self._partitions.committed(part, batch, reply)

    @contextmanager
    def _uncommitted(self, applied: Sequence[tuple[Partition, AppliedBatch]]) -> Generator[None]:
        """If the block raises, drop the partitions of these batches: their state is ahead of the last commit."""
        try:
            yield
        except BaseException:
            for part, _ in applied:
                self._partitions.drop(part)
            raise

    # --- one batch --------------------------------------------------------------------------------------------

    async def _apply(self, part: Partition, entries: Sequence[Entry]) -> AppliedBatch | None:
        """Apply the entries and build their commit. None if that goes on in the background, or if the logic raised."""
        first = entries[0]
        with self._applying(part):
            if part.isolated.exhausted and part.isolated.entry_id == first[0].decode():
                return part.quarantine(
                    first, f"{part.loads - 1} tries did not commit: its workers died, or the stage raised"
                )
            batch = part.apply(entries)
            if rest := entries[len(batch.entries) :]:
                self._input.put_back(part, rest)
            if part.logic.replay_unfinished:
                if not self._is_cluster:
                    task = self._partitions.start(part.number, partial(self._finish, part, batch))
                    task.add_done_callback(lambda _: self._input.wake())
                    return None
                with slack(SETTLING_S):
                    await part.logic.finish_replay()
            return part.build_commit(batch)
        return None

    async def _finish(self, part: Partition, batch: AppliedBatch) -> None:
        """Run `finish_replay` and commit one batch in the background. The partition is not read meanwhile and may be
        revoked.
        """
        with self._applying(part, passes=(RedisError, OSError)):
            with slack(SETTLING_S):
                await part.logic.finish_replay()
            async with holding(self.lock_of(part.number)):
                if self._partitions.get(part.number) is part:
                    await self._submit([(part, part.build_commit(batch))])

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
            log.exception("%s partition %d: the logic failed", self.options.group, part.number)
            self._partitions.drop_failed(part)
        except BaseException:
            self._partitions.drop(part)
            raise

    async def _first_alone(self, part: Partition, batch: Batch) -> Sequence[Entry]:
        """Take the first entry alone, and record it before trying in case it crashes this worker."""
        first = batch.entries[:1]
        part.isolated = part.isolated.after(first[0][0].decode())
        await self._commits.note(part, TRIES_FIELD, part.isolated.stored())
        return first
