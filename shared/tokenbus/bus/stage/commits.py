"""Writes of a stage to its partitions: commits, dead letters and lease fields, retried until the server accepts them;
and the repair of a fail-over that lost commits.

A promoted replica serves a past state of its master, and readers may have seen events that the server has not now. Its
offset is the end of some commit. The commits after that offset, which their owner keeps in a `CommitJournal`, are
exactly what the partition lost.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import msgspec
from redis.exceptions import RedisError, ResponseError

from tokenbus.bus import scripts
from tokenbus.bus.dead_letters import DeadLetter, dead_letter
from tokenbus.bus.keys import InternalTopic, Keys
from tokenbus.bus.leases import Lease
from tokenbus.bus.server.error_replies import is_alien, is_final
from tokenbus.bus.server.retry import ISOLATED_TRIES, MAX_TRIES, retry_until_available
from tokenbus.bus.server.run_scripts import run_script, run_scripts
from tokenbus.bus.server.server import Server
from tokenbus.bus.server.stream_reader import id_key
from tokenbus.bus.stage.partition import AppliedBatch, Partition, Poison
from tokenbus.events.child_runs import root_of
from tokenbus.events.error_info import ErrorInfo

log = logging.getLogger(__name__)

OWED_TTL_MS = 7 * 86_400_000
"""Lifetime of what a partition owes, which is deleted as soon as it is written."""
KEPT_S = 5.0
"""How long a commit is kept. A replica with a working link lags by a fraction of a second. A replica whose link broke
may be promoted too, but its lag can be minutes, and a few more seconds here would not cover that.
"""
MAX_BYTES = 2**19
"""Approximate memory limit per partition, so that a worker with many busy partitions stays within a few MB."""
LOST_WRITES = ErrorInfo(
    code="server_lost_writes",
    kind="internal",
    message="the server failed over and forgot events of this run that were out already",
)
REPAIRED_FIELD = "repaired"
"""The lease hash's field with the name of the last commit that repaired a fail-over."""
_DONE = (b"ok", b"already")
_LARGE = count(1)


class StageOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker takes part in a stage."""

    group: str
    topic: InternalTopic
    """The stage's input."""
    worker: str
    downstream: str | None = None
    """The group that reads the outputs. A partition is not read while ``downstream`` lags by more than ``lag_bytes`` in
    it.
    """
    lag_bytes: int = 8 * 2**20
    lease_s: float = 3.0
    tick_s: float = 0.25
    max_records: int = 256
    """Maximum entries of one read per stream."""
    topic_entries: int = 50_000
    dead_entries: int = 10_000
    entries_read: bool = True
    """The server supports XGROUP SETID … ENTRIESREAD (Redis 7)."""


class Commits:
    """Writes of one stage. Methods raise redis-py's errors if a retry cannot help, and after `close`."""

    def __init__(self, server: Server, keys: Keys, options: StageOptions) -> None:
        self._server = server
        self._keys = keys
        self._options = options
        self._group = options.group
        self._what = f"commit of {options.group}"
        self._closed = False

    def close(self) -> None:
        """Stop retrying."""
        self._closed = True

    async def submit(self, worked: Sequence[tuple[Partition, AppliedBatch]]) -> list[list[Any]]:
        """Commit the batches and return one reply for each: `refused` if the server accepts the others but not that
        one.
        """
        for part, batch in worked:
            if batch.poison and await self._stands(part, batch):
                for poison in batch.poison:
                    await self._dead_letter(part, poison)
        together = [self._call_of(*each) for each in worked if not each[1].commit.is_large]
        replies = iter(await self._submit_together(together) if together else ())
        return [await self._submit_large(*each) if each[1].commit.is_large else next(replies) for each in worked]

    async def _stands(self, part: Partition, batch: AppliedBatch) -> bool:
        """Whether the server is where the batch begins. After a fail-over that lost what came before, its frames are
        applied to a state that does not count, and its commit is refused.
        """
        token, offset = await retry_until_available(
            self._server,
            lambda: self._server.client.hmget(part.lease_key, ["token", "offset"]),
            what=self._what,
            stop_if=self._is_closed,
        )
        return token == part.token.encode() and offset == batch.begin.encode()

    async def _submit_together(self, calls: Sequence[scripts.ScriptCall]) -> list[list[Any]]:
        try:
            return await retry_until_available(
                self._server, lambda: run_scripts(self._server, calls), what=self._what, stop_if=self._is_closed
            )
        except (RedisError, OSError):
            if self._closed:
                raise
        # At least one call fails. Send each alone so that the others go through; those already committed reply
        # `already`.
        replies: list[list[Any]] = []
        for call in calls:
            try:
                replies.append(await self._run(call, tries=ISOLATED_TRIES))
            except (RedisError, OSError) as e:
                if self._closed:
                    raise
                replies.append([b"refused", e])
        return replies

    # --- a commit that is too large for one script -------------------------------------------------------------------
    #
    # Its writes are stored first, in parts (`owe`). The commit moves the offset and says what the partition owes; then
    # each part is written, by this owner or the next one. Until then no other commit of the partition is accepted.

    async def _submit_large(self, part: Partition, batch: AppliedBatch) -> list[Any]:
        try:
            return await self._commit_in_parts(_after(part), batch.commit, partial(self._call_of, part, batch))
        except (RedisError, OSError) as e:
            if self._closed:
                raise
            return [b"refused", e]

    async def _commit_in_parts(
        self, after: Lease, commit: scripts.Commit, call: Callable[..., scripts.ScriptCall]
    ) -> list[Any]:
        """``after``: the position after the commit. ``call``: makes the call, of another commit and what is owed."""
        parts, name = commit.parts(), f"{after.token}.{next(_LARGE)}"
        lease_key, key = commit.keys[0], self._keys.owed(after.partition, self._group)
        for n, one in zip(range(len(parts), 0, -1), parts, strict=True):
            stored = scripts.owe(
                lease_key, key, token=after.token, name=f"{name} {n}", part=one.encoded(), ttl_ms=OWED_TTL_MS
            )
            if not await self._run(stored):
                return [b"fenced", b"0"]
        owed = f"{name} {len(parts)}"
        reply = await self._run(call(self._empty(after.partition), owes=owed))
        return await self._write_owed(after, owed, parts) if reply[0] in _DONE else reply

    async def settle(self, lease: Lease) -> None:
        """Write what the partition's last owner committed and did not get to write."""
        client, key = self._server.client, self._keys.owed(lease.partition, self._group)
        owed = await client.hget(self._keys.lease(lease.partition, self._group), "owed")
        while owed:
            found = await client.hget(key, owed)
            try:
                if found is None:
                    raise LookupError(f"{key} has no {owed}")
                reply = await self._write_owed(lease, owed.decode(), [scripts.Commit.decode(found)])
            except (LookupError, msgspec.DecodeError, UnicodeDecodeError, RecursionError, ResponseError) as e:
                if isinstance(e, ResponseError) and (is_alien(e) or not is_final(e)):
                    raise
                log.exception("%s partition %d: a part of the last commit is lost", self._group, lease.partition)
                reply = await self._write_owed(lease, owed.decode(), [self._empty(lease.partition)])
            if reply[0] not in _DONE:
                return
            owed = await client.hget(self._keys.lease(lease.partition, self._group), "owed")

    async def _write_owed(self, lease: Lease, owed: str, parts: Sequence[scripts.Commit]) -> list[Any]:
        """Write these parts, the next ones. The reply is that of a whole commit."""
        key = self._keys.owed(lease.partition, self._group)
        lags: list[int] = []
        for one in parts:
            name, _, left = owed.rpartition(" ")
            owes = f"{name} {int(left) - 1}" if int(left) > 1 else ""
            one.drop(key, owed)
            if not owes:
                one.expire(key, 0)  # deletes it
            reply = await self._run(self._call(lease, one, owed=owed, owes=owes))
            if reply[0] not in _DONE:
                return reply
            lags += reply[2:]
            owed = owes
        return [b"ok", lease.offset.encode(), *lags]

    # --- further writes ----------------------------------------------------------------------------------------------

    async def recover_rollback(self, part: Partition, lease: Lease, commit: scripts.Commit) -> str | None:
        """Commit the events that a fail-over lost, at the server's current offset. Returns the name of this repair, for
        `last_repair`; None if the server has not taken it.

        No offset shows whether they are written, so they are owed like a large commit: a lost reply repeats nothing.
        """
        name = f"{lease.token}.{next(_LARGE)}"
        commit.put(part.lease_key, REPAIRED_FIELD, name)
        reply = await self._commit_in_parts(lease, commit, partial(self._call, lease))
        # Nothing is owed after a repair, and nothing where a further fail-over lost it: `already` says either.
        if reply[0] in _DONE and await self.last_repair(lease) == name:
            return name
        log.error("%s partition %d: runs that lost events continue: %s", self._group, part.number, reply)
        return None

    async def last_repair(self, lease: Lease) -> str:
        """The name of the partition's last repair that the server has; empty if there was none."""
        key = self._keys.lease(lease.partition, self._group)
        found = await retry_until_available(
            self._server,
            lambda: self._server.client.hget(key, REPAIRED_FIELD),
            what=self._what,
            stop_if=self._is_closed,
        )
        return (found or b"").decode(errors="replace")

    async def note(self, part: Partition, field: str, value: str | int) -> None:
        """Set a field of the partition's lease hash. The next owner reads it."""
        await retry_until_available(
            self._server,
            lambda: run_script(self._server, scripts.note(part.lease_key, field=field, value=value)),
            what=f"note of {self._group}",
            stop_if=self._is_closed,
        )

    def _is_closed(self) -> bool:
        return self._closed

    def _call_of(
        self, part: Partition, batch: AppliedBatch, commit: scripts.Commit | None = None, owes: str = ""
    ) -> scripts.ScriptCall:
        entries, size = len(batch.entries), batch.size
        commit = batch.commit if commit is None else commit
        return self._call(_after(part), commit, begin=batch.begin, entries=entries, size=size, owes=owes)

    def _call(
        self,
        after: Lease,
        commit: scripts.Commit,
        *,
        begin: str | None = None,
        entries: int = 0,
        size: int = 0,
        owed: str = "",
        owes: str = "",
    ) -> scripts.ScriptCall:
        """``after``: the position after the commit. ``begin``: the offset before it, if it moves that."""
        return commit.call(
            token=after.token,
            ttl_ms=round(self._options.lease_s * 1000),
            begin=after.offset if begin is None else begin,
            end=after.offset,
            watermark=after.watermark,
            entries=entries,
            size=size,
            mirror=self._group,
            entries_read=self._options.entries_read,
            topic_entries=self._options.topic_entries,
            owed=owed,
            owes=owes,
        )

    async def _run(self, call: scripts.ScriptCall, *, tries: int = MAX_TRIES) -> Any:
        return await retry_until_available(
            self._server,
            lambda: run_script(self._server, call),
            what=self._what,
            stop_if=self._is_closed,
            tries=tries,
        )

    def _empty(self, partition: int) -> scripts.Commit:
        return scripts.Commit(
            self._keys.lease(partition, self._group), self._keys.topic(partition, self._options.topic)
        )

    async def _dead_letter(self, part: Partition, poison: Poison) -> None:
        """Write the poison frame to the dead stream before the commit: a crash in between may duplicate it but never
        lose it.
        """
        if poison.cause:
            what = "%s partition %d: entry %s, run %s"
            log.error(what, self._group, part.number, poison.entry_id, poison.run, exc_info=poison.cause)
        entry = DeadLetter(
            reason=poison.reason,
            stage=self._group,
            stream=part.stream,
            entry=poison.entry_id,
            bytes=poison.frame,
            run=poison.run,
            size=poison.size,
        )
        await dead_letter(self._server, self._keys, entry, most=self._options.dead_entries, stop_if=self._is_closed)


def _after(part: Partition) -> Lease:
    """The position of a partition that has applied a batch."""
    return Lease(part.number, part.token, part.offset, part.watermark)


class Past(msgspec.Struct):
    """What this worker committed to a partition until it dropped or lost it: a fail-over may have lost it since."""

    journal: CommitJournal
    kept_at: float
    repair: str | None = None
    """The name of the commit that repaired a loss of it. It moved no offset, so it alone says whether it is there."""


class CommitJournal:
    """The most recent commits, starting at ``offset``: those of the last few seconds, up to ``MAX_BYTES``."""

    def __init__(self, offset: str) -> None:
        self.offset = offset
        """End of the last commit."""
        self._begin = offset
        """Start of the oldest commit that is kept."""
        self._commits: deque[tuple[str, bytes, float]] = deque()
        """For each commit: its end, the batch in msgpack (its objects take three times the memory), and its time."""
        self._held = 0

    def keep(self, offset: str, batch: AppliedBatch, now: float) -> None:
        """Add a commit that ended at ``offset``. The server had it at ``now`` (seconds of a monotonic clock).

        Older commits expire only in this call, so an outage of any length drops nothing.
        """
        self.offset = offset
        packed = msgspec.msgpack.encode((batch.begin, batch.entries, batch.commit.encoded()))
        self._commits.append((offset, packed, now))
        self._held += len(packed)
        while self._commits and (self._held > MAX_BYTES or self._commits[0][2] < now - KEPT_S):
            self._begin, packed, _ = self._commits.popleft()
            self._held -= len(packed)

    def is_ahead_of(self, offset: str) -> bool:
        """Whether the server, now at ``offset``, lost a commit."""
        return id_key(offset) < id_key(self.offset)

    def after(self, offset: str) -> list[AppliedBatch]:
        """The commits after ``offset``; empty if some of them are no longer kept, because a log must have no gap."""
        if id_key(offset) < id_key(self._begin):
            return []
        return [_unpacked(packed) for end, packed, _ in self._commits if id_key(end) > id_key(offset)]


_decode_kept = msgspec.msgpack.Decoder(tuple[str, list[tuple[bytes, dict[bytes, bytes]]], bytes]).decode


def _unpacked(packed: bytes) -> AppliedBatch:
    begin, entries, commit = _decode_kept(packed)
    return AppliedBatch(begin=begin, entries=entries, commit=scripts.Commit.decode(commit))


def lost_events(lost: Sequence[AppliedBatch], keys: Keys) -> dict[str, int]:
    """The runs whose public events a roll-back has lost, each with the number of the event after these."""
    numbers: dict[str, int] = {}
    for batch in lost:
        for run in {name.decode(errors="replace") for _, fields in batch.entries for name in fields}:
            if published := batch.commit.last_of(keys.log(run)):
                numbers[run] = id_key(published)[1] + 1
    return numbers


def repair_commit(past: Partition, lost: Sequence[AppliedBatch], numbers: Mapping[str, int]) -> scripts.Commit:
    """The commit that repairs the roll-back for these runs (`lost_events`).

    ``past`` is the partition in the state of the server's offset, ``lost`` the commits after it. The commit moves no
    offset. For each affected run it publishes the lost events again, so that the log has no gap, repeats what others
    wait for (`StageLogic.repeat`), and then ends the run with `LOST_WRITES` unless its end was among them; if the logic
    holds that end back, the commit has its state. Input of the run that is there at the commit is ignored: its request
    may come again meanwhile. Reload the partition afterwards.
    """
    commit, logic, keys = scripts.Commit(past.lease_key, past.stream), past.logic, past.keys
    ours = {key for run in numbers for key in (keys.run(run), keys.log(run), keys.tree(root_of(run)))}
    for batch in lost:
        past.replay(batch.entries)
        commit.repeat(batch.commit, ours)
        logic.repeat(batch.commit, numbers, commit)
    for run, seq in sorted(numbers.items()):
        if logic.is_open(run):
            logic.recall(run, seq)
            logic.abandon(run, LOST_WRITES)
        past.runs.drop_pieces(run, commit)
        commit.void(past.state_key, past.stream, run)  # before the flush, which may begin the run anew
    logic.flush(commit)
    for run in filter(logic.is_open, sorted(numbers)):
        commit.void(past.state_key, past.stream, run, logic.snapshot(run))
    return commit
