"""Load a partition under its lease: rebuild its last owner's state, or give that up after too many tries."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from redis.exceptions import RedisError

from tokenbus.bus import scripts
from tokenbus.bus.keys import InternalTopic, Keys
from tokenbus.bus.layout import widen_if_stale
from tokenbus.bus.leases.lease import Lease
from tokenbus.bus.scripts import Commit
from tokenbus.bus.server.retry import retry_until_available
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus.bus.stage.committer import Committer
from tokenbus.bus.stage.loading.careful_replay import CAREFUL_REPLAYS, STEPS_FIELD, CarefulReplay, NotedSteps
from tokenbus.bus.stage.loading.recovery import give_up_state, learn_from_logs, rebuild, run_position, run_positions
from tokenbus.bus.stage.logic import StageLogic
from tokenbus.bus.stage.partition import Partition

log = logging.getLogger(__name__)

MAX_REPLAYS = 8
"""After this many unfinished replays in a row, by an error or a death, the partition continues without its
state: its open runs end as `state_unreadable`.
"""
WITHDRAW_S = 1.0
"""The wait for the server as a replay is withdrawn, while the lease's other work waits."""
REPLAYS_FIELD = "replays"
"""The lease hash's count of unfinished replays in a row."""


class PartitionLoader:
    """Loads the partitions of one stage. Methods raise redis-py's errors if a retry cannot help."""

    def __init__(
        self,
        server: Server,
        keys: Keys,
        commits: Committer,
        *,
        group: str,
        topic: InternalTopic,
        logic: Callable[[int], StageLogic],
    ) -> None:
        self._server = server
        self._keys = keys
        self._commits = commits
        self._group = group
        self._topic: InternalTopic = topic
        self._logic = logic
        self._what = f"replay of {group}"
        self._unfinished: dict[int, tuple[Lease, bytes | None]] = {}
        """By partition: the replays in progress. A careful one has the notes that it found."""

    async def load(self, lease: Lease) -> Partition:
        """The partition in its last owner's state. Retries while the server is unavailable."""
        begun = scripts.count(self._keys.lease(lease.partition, self._group), field=REPLAYS_FIELD)
        self._unfinished[lease.partition] = lease, None
        replays = await retry_until_available(self._server, lambda: run_script(self._server, begun), what=self._what)
        try:
            part = await self._load(lease, replays)
        except Exception:
            del self._unfinished[lease.partition]  # a failure counts
            raise
        del self._unfinished[lease.partition]
        return part

    async def _load(self, lease: Lease, replays: int) -> Partition:
        if replays > MAX_REPLAYS:
            log.error("%s partition %d: its state is given up", self._group, lease.partition)
        careful = await self._careful(lease) if replays > CAREFUL_REPLAYS else None
        part, commit = await retry_until_available(
            self._server, lambda: self._restored(lease, replays, careful), what=self._what
        )
        if commit:
            await self._commits.recover_rollback(part, lease, commit)
        await self._commits.note(part, REPLAYS_FIELD, 0)
        if careful:
            await self._commits.note(part, STEPS_FIELD, "")
        return part

    async def position(self, part: Partition, *, stop_if: Callable[[], bool] = lambda: False) -> Lease:
        """The server's current position of a partition that this worker owns. Retries while the server is
        unavailable."""
        return await retry_until_available(
            self._server, lambda: run_position(self._server, part), what=self._what, stop_if=stop_if
        )

    async def rebuilt(self, lease: Lease, *, stop_if: Callable[[], bool] = lambda: False) -> Partition:
        """As `load`, without counting tries and without ending runs whose state is unreadable."""
        return await retry_until_available(self._server, lambda: self._rebuilt(lease), what=self._what, stop_if=stop_if)

    async def withdraw(self, partition: int) -> None:
        """The worker gives up a replay in progress because it stops or hands the partition over: the state was not at
        fault, so the replay does not count. Await this before the lease is released. Does nothing if the server does
        not answer in time.
        """
        if partition not in self._unfinished:
            return
        lease, notes = self._unfinished.pop(partition)
        call = scripts.withdraw_replay(
            self._keys.lease(partition, self._group),
            token=lease.token,
            count=REPLAYS_FIELD,
            notes=() if notes is None else (STEPS_FIELD, notes),
        )
        with suppress(RedisError, OSError):
            async with asyncio.timeout(WITHDRAW_S):
                await run_script(self._server, call)

    async def reset_replays(self, partition: int) -> None:
        """Reset the count of replays, because the partition's state was not at fault. Does nothing if the server is
        unavailable."""
        with suppress(RedisError, OSError):
            lease_key = self._keys.lease(partition, self._group)
            await run_script(self._server, scripts.note(lease_key, field=REPLAYS_FIELD, value=0))

    async def _careful(self, lease: Lease) -> CarefulReplay:
        """The replay after some unfinished ones; it knows the step at which the last of them stopped."""
        lease_key = self._keys.lease(lease.partition, self._group)
        found = await retry_until_available(
            self._server, lambda: self._server.client.hget(lease_key, STEPS_FIELD), what=self._what
        )
        self._unfinished[lease.partition] = lease, found or b""
        return CarefulReplay(self._server, lease_key, NotedSteps.parse(found))

    async def _rebuilt(self, lease: Lease, careful: CarefulReplay | None = None) -> Partition:
        await self._commits.settle(lease)
        part = self._new(lease)
        await widen_if_stale(self._server, self._keys)
        await rebuild(self._server, self._keys.within(part.number), part, lease, careful)
        return part

    def _new(self, lease: Lease) -> Partition:
        logic = self._logic(lease.partition)
        return Partition(lease, logic, keys=self._keys, topic=self._topic, group=self._group)

    async def _restored(
        self, lease: Lease, replays: int, careful: CarefulReplay | None
    ) -> tuple[Partition, Commit | None]:
        """The partition in its last owner's state, and the commit that ends runs whose state is unreadable, if any.

        After too many unfinished replays, this holds for all of its open runs.
        """
        keys = self._keys.within(lease.partition)
        if replays > MAX_REPLAYS:
            await self._commits.settle(lease)
            part = self._new(lease)
            await give_up_state(self._server, keys, part, lease, f"{replays - 1} replays did not finish")
        else:
            part = await self._rebuilt(lease, careful)
        if not part.unread:
            return part, None
        found = await run_positions(self._server, keys, part.unread)
        await learn_from_logs(self._server, keys, part, [run for run, at in found.items() if not at.over])
        return part, part.fail_unreadable(found)
