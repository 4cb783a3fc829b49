"""The partitions of one worker in a stage: loaded when their lease is acquired, dropped when it is lost."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from redis.exceptions import RedisError

from tokenbus.bus import scripts
from tokenbus.bus.keys import Keys
from tokenbus.bus.layout import widen_if_stale
from tokenbus.bus.leases import Lease, Leases
from tokenbus.bus.liveness import Liveness, holding, stop_task
from tokenbus.bus.scripts import Commit
from tokenbus.bus.server.error_replies import is_alien
from tokenbus.bus.server.retry import retry_until_available
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus.bus.stage.commits import CommitJournal, Commits, Past, StageOptions, lost_events, repair_commit
from tokenbus.bus.stage.logic import StageLogic
from tokenbus.bus.stage.partition import CAREFUL_LOADS, TRIES_FIELD, AppliedBatch, Partition
from tokenbus.bus.stage.replay import (
    CAREFUL_REPLAYS,
    STEPS_FIELD,
    CarefulReplay,
    NotedSteps,
    Replaced,
    give_up_state,
    learn_from_logs,
    rebuild,
    run_position,
    run_positions,
)

log = logging.getLogger(__name__)

BLOCKED_S = 1.0
"""Retry interval for a partition with a shared key of the wrong type."""
MAX_REPLAYS = 8
"""After this many unfinished replays in a row, by an error or a death, the partition continues without its
state: its open runs end as `state_unreadable`.
"""
WITHDRAW_S = 1.0
"""The wait for the server as a replay is withdrawn, while the lease's other work waits."""
MOST_REPAIRS = 4
"""How often the same loss is repaired while further fail-overs lose the repair."""
MOST_PASTS = 3
"""How many a partition keeps of what was committed before it was last loaded."""
PAST_S = 60.0
"""How long: the owner of a partition is back sooner, or another one has it."""
REPLAYS_FIELD = "replays"
"""The lease hash's count of unfinished replays in a row."""


class Partitions:
    """What a worker has of its leases: the state of each partition in memory, and the journal of its commits."""

    def __init__(
        self,
        server: Server,
        keys: Keys,
        options: StageOptions,
        commits: Commits,
        logic: Callable[[int], StageLogic],
        *,
        liveness: Liveness,
    ) -> None:
        self._server = server
        self._keys = keys
        self._options = options
        self._group = options.group
        self._commits = commits
        self._logic = logic
        self._liveness = liveness
        self.on_change: Callable[[], None] = lambda: None
        """Called when a partition was loaded or dropped."""
        self._retry_s = 2 * options.lease_s
        """How long this worker leaves a partition to others that it could not process."""
        self._what = f"replay of {options.group}"
        self._closed = False
        self.parts: dict[str, Partition] = {}
        """Loaded partitions by stream."""
        self._streams: dict[int, str] = {}
        """The stream of each partition, of which a flush asks many times."""
        self._journals: dict[int, CommitJournal] = {}
        self._pasts: dict[int, list[Past]] = {}
        """By partition: what this worker committed before, oldest first."""
        self._blocked: set[int] = set()
        """Partitions that wait because a key of theirs has the wrong type; see `blocked`."""
        self._loading: dict[int, asyncio.Task[None]] = {}
        self._unfinished: dict[int, tuple[Lease, bytes | None]] = {}
        """By partition: the replays in progress. A careful one has the notes that it found."""
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """Tasks of partitions that are processed apart (Cluster) or are in `finish_replay`."""
        self._locks: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.leases = Leases(
            server,
            keys,
            group=options.group,
            topic=options.topic,
            worker=options.worker,
            on_acquired=self._on_acquired,
            on_revoked=self._on_revoked,
            on_rollback=self._on_rollback,
            ttl_s=options.lease_s,
            tick_s=options.tick_s,
            liveness=liveness,
        )

    @property
    def blocked(self) -> list[int]:
        """Partitions of this worker that wait because a shared key has the wrong type."""
        return sorted(self._blocked | self.leases.blocked)

    def get(self, partition: int) -> Partition | None:
        stream = self._streams.get(partition)
        if stream is None:
            stream = self._streams[partition] = self._keys.topic(partition, self._options.topic)
        return self.parts.get(stream)

    def lock_of(self, partition: int) -> asyncio.Lock:
        """Serializes work on the partition: one lock for all, or in a Cluster, where a failing node must not block the
        others, one per partition.
        """
        return self._locks[partition if self._server.topology == "cluster" else 0]

    async def close(self) -> None:
        """Forget all partitions, and stop what is loading or in progress. Close the leases before."""
        self._closed = True
        self.parts.clear()
        tasks = [*self._loading.values(), *self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- tasks beside the stage's loop, at most one per partition -----------------------------------------------------

    def is_busy(self, part: Partition) -> bool:
        """Whether a task runs for the partition, which is not read meanwhile."""
        return part.number in self._tasks

    def is_ready(self, part: Partition) -> bool:
        """Whether the partition can be processed now."""
        return not part.paused and part.number not in self._tasks

    def start(self, partition: int, doing: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Start `doing` for a partition. The task never raises; it logs failures."""

        async def do() -> None:
            try:
                await doing()
            except (RedisError, OSError) as e:
                if not self._closed:
                    log.warning("%s partition %d: %s", self._group, partition, e)
                    self._liveness.failed_work(f"background {self._group}")
            except Exception:
                # Its input is read again, because the partition's offset did not move. An entry that always fails in
                # this way is processed alone after some loads, and then given up.
                log.exception("%s partition %d", self._group, partition)
                self._liveness.failed_work(f"background {self._group}")
            finally:
                del self._tasks[partition]

        name = f"{self._group} {partition}"
        task = self._tasks[partition] = self._liveness.start_passing(do(), name=name)
        return task

    # --- leases -----------------------------------------------------------------------------------------------------

    def _on_acquired(self, lease: Lease) -> None:
        self._start_loading(lease.partition, self._load(lease))

    async def _on_revoked(self, partition: int) -> None:
        if loading := self._loading.pop(partition, None):
            await stop_task(loading)
            if not self._liveness.failed:  # the replay may be what this worker failed at
                await self._withdraw(partition)
        async with holding(self.lock_of(partition)):
            self._remove(partition)

    def drop(self, part: Partition, *, retry_s: float = 0.0) -> None:
        """Forget the partition so that it is reloaded, elsewhere or, after ``retry_s``, here. No effect if that has
        happened already.
        """
        if self.parts.get(part.stream) is part:
            self.leases.forget(part.number, retry_s=retry_s)
            self._remove(part.number)

    def drop_failed(self, part: Partition) -> None:
        """`drop` a partition that this worker cannot process; another may succeed."""
        self.drop(part, retry_s=self._retry_s)

    def _remove(self, partition: int) -> None:
        if self.parts.pop(self._keys.topic(partition, self._options.topic), None):
            self._keep(partition, self._journals.pop(partition))
            self.on_change()

    def _keep(self, partition: int, journal: CommitJournal, repair: str | None = None) -> None:
        """Remember what this worker committed, for the next time that it loads the partition."""
        now = asyncio.get_running_loop().time()
        self._pasts = {p: kept for p, kept in self._pasts.items() if kept[-1].kept_at > now - PAST_S}
        kept = self._pasts.get(partition, [])
        if repair is None and any(past.journal is journal for past in kept):
            return  # it is repaired
        kept = [past for past in kept if past.journal is not journal]
        self._pasts[partition] = [*kept, Past(journal, now, repair)][-MOST_PASTS:]

    def block(self, part: Partition, why: str) -> None:
        """Pause a partition whose shared key has the wrong type. No entry is at fault, and the other partitions
        continue.
        """
        self._note_blocked(part.number, why)
        self.drop(part, retry_s=BLOCKED_S)

    def _note_blocked(self, partition: int, why: str) -> None:
        if partition not in self._blocked:
            log.error(
                "%s partition %d waits until its key is fixed (delete or rename it): %s", self._group, partition, why
            )
        self._blocked.add(partition)

    # --- commits ------------------------------------------------------------------------------------------------------

    async def committed(self, part: Partition, batch: AppliedBatch, reply: list[Any]) -> None:
        """Handle the reply to a commit of this partition, while its lock is held: continue, wait for a key to be fixed,
        or drop the state.
        """
        if reply[0] in (b"ok", b"already"):
            self._journals[part.number].keep(part.offset, batch, asyncio.get_running_loop().time())
            self.leases.committed(part.number, part.offset)
            part.loads = 0
            self._blocked.discard(part.number)
            part.paused = any(lag > self._options.lag_bytes for lag in reply[2:])
            return
        refused = reply[0] == b"refused"
        if refused and is_alien(error := reply[1]):
            self.block(part, str(error))
            return
        # Another owner committed, the server rolled back, or the commit cannot succeed: this worker's state is invalid.
        log.warning("%s partition %d: dropped: %s", self._group, part.number, reply)
        given_up = part.isolated.exhausted
        try:
            if refused and not given_up:
                # Process the entries one at a time next. If this was a single entry already, it is quarantined then,
                # and its runs end so that the others continue.
                if part.loads > CAREFUL_LOADS:
                    await self._commits.note(part, TRIES_FIELD, part.isolated.refused().stored())
                else:
                    await self._commits.note(part, "loads", CAREFUL_LOADS)
            journal = self._journals[part.number]
            if reply[0] == b"moved" and journal.is_ahead_of(reply[1].decode()):
                await self._recover_rollback(part, journal)
        finally:
            self.drop(part, retry_s=self._retry_s if refused and given_up else 0)

    async def _on_rollback(self, partition: int, offset: str) -> None:
        async with holding(self.lock_of(partition)):
            part = self.get(partition)
            if part and (journal := self._journals[partition]).is_ahead_of(offset):
                try:
                    await self._recover_rollback(part, journal)
                finally:
                    self.drop(part)

    async def _recover_rollback(self, part: Partition, journal: CommitJournal) -> bool:
        """End the runs whose readers saw more events than the server has now, after a fail-over that lost writes;
        publish those events with their old numbers. Returns whether there are any: then load the partition anew.
        """
        for _ in range(MOST_REPAIRS):
            try:
                lease = await retry_until_available(
                    self._server, lambda: run_position(self._server, part), what=self._what, stop_if=self._is_closed
                )
                what = "%s partition %d: a fail-over lost the entries after %s"
                log.error(what, self._group, part.number, lease.offset)
                lost = journal.after(lease.offset)
                if not (numbers := lost_events(lost, self._keys)):
                    # A logic that works on its own, such as that of policies, must see no entry that does not count.
                    return False
                past = await retry_until_available(
                    self._server, lambda at=lease: self._rebuilt(at), what=self._what, stop_if=self._is_closed
                )
            except Replaced as e:  # the next load knows of it
                log.warning("%s partition %d: %s", self._group, part.number, e)
                return True
            commit = repair_commit(past, lost, numbers)
            if repair := await self._commits.recover_rollback(part, lease, commit):
                self._keep(part.number, journal, repair)
                return True
        return True

    async def _recover_pasts(self, lease: Lease) -> CommitJournal | None:
        """Repair what a fail-over lost of what this worker committed before, if nobody has owned the partition since;
        raises Replaced if there was something: load the partition anew. Returns the journal to go on with, if any.

        A repair is lost without a trace in the offset. But the lease that follows it is lost with it, so the partition
        is loaded again.
        """
        pasts = self._pasts.pop(lease.partition, [])
        if lease.before.partition(":")[2] != self._options.worker:
            return None
        part, lost = self._new(lease), False
        there = await self._commits.last_repair(lease) if any(past.repair for past in pasts) else None
        present = max((n for n, past in enumerate(pasts) if past.repair and past.repair == there), default=-1)
        for n, past in enumerate(pasts):
            if n <= present and past.repair:
                self._pasts.setdefault(lease.partition, []).append(past)
            elif n > present and past.journal.is_ahead_of(lease.offset):
                lost = await self._recover_rollback(part, past.journal) or lost
        if lost:
            raise Replaced(f"{part.lease_key}: a fail-over lost what its owner had written")
        return (
            pasts[-1].journal if pasts and not pasts[-1].repair and pasts[-1].journal.offset == lease.offset else None
        )

    def _is_closed(self) -> bool:
        return self._closed

    # --- loading: rebuild the last owner's state, or give that up after too many tries --------------------------------

    def _start_loading(self, partition: int, load: Any) -> None:
        name = f"replay {self._group} {partition}"
        self._loading[partition] = self._liveness.start_passing(load, name=name)

    def reload(self, part: Partition) -> None:
        """Rebuild the partition: its state is ahead of the log. No effect if it is not owned now.

        Under a new token, because the command that was to write that state may still arrive, and the rebuild would
        then be of neither moment.
        """
        lease = self.leases.owned.get(part.number)
        if self.parts.get(part.stream) is not part or lease is None or lease.token != part.token:
            self.drop(part)
            return
        self._remove(part.number)
        self._start_loading(part.number, self._load_again(part.number))

    async def _load_again(self, partition: int) -> None:
        try:
            lease = await retry_until_available(
                self._server, lambda: self.leases.acquire_again(partition), what=self._what
            )
        except Exception:
            log.exception("replay of %s of partition %d failed", self._group, partition)
            lease = None
        if lease is None:
            self.leases.forget(partition, retry_s=self._retry_s)
            self._loading.pop(partition, None)
            return
        await self._load(lease)

    async def _load(self, lease: Lease) -> None:
        """Rebuild the partition's state, then start reading it. Retries while the server is unavailable."""
        try:
            journal = await self._recover_pasts(lease)
            part = await self._counted_replay(lease)
        except Replaced as e:
            log.warning("%s partition %d is loaded again: %s", self._group, lease.partition, e)
            self.leases.forget(lease.partition)
            return
        except Exception as e:
            if self._closed:
                return
            if is_alien(e):  # its state is not at fault, so the tries do not count
                self._note_blocked(lease.partition, str(e))
                self.leases.forget(lease.partition, retry_s=BLOCKED_S)
                lease_key = self._keys.lease(lease.partition, self._group)
                with suppress(RedisError, OSError):
                    await run_script(self._server, scripts.note(lease_key, field=REPLAYS_FIELD, value=0))
            else:
                # Another worker may succeed once the lease has expired. Tries are bounded by `MAX_REPLAYS`.
                log.exception("replay of partition %d of %s failed", lease.partition, self._group)
                self._liveness.failed_work(f"replay {self._group}")
                self.leases.forget(lease.partition, retry_s=self._retry_s)
            return
        finally:
            self._loading.pop(lease.partition, None)
        self.parts[part.stream] = part
        self._journals[part.number] = journal or CommitJournal(part.offset)
        self.on_change()

    async def _counted_replay(self, lease: Lease) -> Partition:
        """The partition in its last owner's state. The lease hash counts this replay until it finishes or fails."""
        begun = scripts.count(self._keys.lease(lease.partition, self._group), field=REPLAYS_FIELD)
        self._unfinished[lease.partition] = lease, None
        replays = await retry_until_available(self._server, lambda: run_script(self._server, begun), what=self._what)
        try:
            part = await self._replayed(lease, replays)
        except Replaced:
            await self._withdraw(lease.partition)
            raise
        except Exception:
            del self._unfinished[lease.partition]  # a failure counts
            raise
        del self._unfinished[lease.partition]
        return part

    async def _replayed(self, lease: Lease, replays: int) -> Partition:
        if replays > MAX_REPLAYS:
            log.error("%s partition %d: its state is given up", self._group, lease.partition)
        careful = await self._careful(lease) if replays > CAREFUL_REPLAYS else None
        part, commit = await retry_until_available(
            self._server, lambda: self._restored(lease, replays, careful), what=self._what
        )
        if commit:
            await self._end_unreadable(part, lease, commit)
        await self._commits.note(part, REPLAYS_FIELD, 0)
        if careful:
            await self._commits.note(part, STEPS_FIELD, "")
        return part

    async def _end_unreadable(self, part: Partition, lease: Lease, commit: Commit) -> None:
        """Commit the ends of runs whose state is unreadable, and take a new token: a fail-over that loses them loses it
        too, which the next commit finds. Raises Replaced if that has happened.
        """
        repair = await self._commits.recover_rollback(part, lease, commit)
        again = await retry_until_available(
            self._server, lambda: self.leases.acquire_again(part.number), what=self._what, stop_if=self._is_closed
        )
        if (
            again is None
            or again.offset != part.offset
            or (repair and await self._commits.last_repair(again) != repair)
        ):
            raise Replaced(f"{part.lease_key}: ended runs are not ended any more")
        part.token = again.token
        if repair:
            self._keep(part.number, CommitJournal(part.offset), repair)

    async def _careful(self, lease: Lease) -> CarefulReplay:
        """The replay after some unfinished ones; it knows the step at which the last of them stopped."""
        lease_key = self._keys.lease(lease.partition, self._group)
        found = await retry_until_available(
            self._server, lambda: self._server.client.hget(lease_key, STEPS_FIELD), what=self._what
        )
        self._unfinished[lease.partition] = lease, found or b""
        return CarefulReplay(self._server, lease_key, NotedSteps.parse(found))

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
            await give_up_state(self._server, part, lease, f"{replays - 1} replays did not finish")
        else:
            part = await self._rebuilt(lease, careful)
        if not part.unread:
            return part, None
        found = await run_positions(self._server, keys, part, part.unread)
        await learn_from_logs(self._server, keys, part, [run for run, at in found.items() if not at.over])
        return part, part.fail_unreadable(found)

    async def _rebuilt(self, lease: Lease, careful: CarefulReplay | None = None) -> Partition:
        await self._commits.settle(lease)
        part = self._new(lease)
        await widen_if_stale(self._server, self._keys)
        await rebuild(self._server, self._keys.within(part.number), part, lease, careful)
        return part

    def _new(self, lease: Lease) -> Partition:
        logic = self._logic(lease.partition)
        return Partition(lease, logic, keys=self._keys, topic=self._options.topic, group=self._group)

    async def _withdraw(self, partition: int) -> None:
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
