"""Writes of a stage to its partitions (commits, dead letters, lease fields), retried until the server accepts them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

import msgspec
from redis.exceptions import RedisError, ResponseError

from tokenbus.bus import scripts
from tokenbus.bus.dead_letters import DeadLetter, dead_letter
from tokenbus.bus.keys import InternalTopic, Keys
from tokenbus.bus.leases.lease import Lease
from tokenbus.bus.server.error_replies import is_alien, is_final
from tokenbus.bus.server.retry import ISOLATED_TRIES, MAX_TRIES, retry_until_available
from tokenbus.bus.server.run_scripts import run_script, run_scripts
from tokenbus.bus.server.server import Server
from tokenbus.bus.stage.partition import Partition
from tokenbus.bus.stage.prepared_commit import Poison, PreparedCommit

log = logging.getLogger(__name__)


OWED_TTL_MS = 7 * 86_400_000
"""Lifetime of what a partition owes, which is deleted as soon as it is written."""
_DONE = (b"ok", b"already")
_LARGE = count(1)


class AppliedBatch(msgspec.Struct, frozen=True):
    """A batch after offset ``begin`` that the partition applied, ready to commit."""

    part: Partition
    begin: str
    work: PreparedCommit


class Committer:
    """Writes of one stage. Methods raise redis-py's errors if a retry cannot help, and after `close`."""

    def __init__(
        self,
        server: Server,
        keys: Keys,
        *,
        group: str,
        topic: InternalTopic,
        lease_s: float,
        topic_entries: int,
        dead_entries: int,
        entries_read: bool,
    ) -> None:
        """``entries_read``: the server supports XGROUP SETID … ENTRIESREAD (Redis 7)."""
        self._server = server
        self._keys = keys
        self._group = group
        self._topic: InternalTopic = topic
        self._lease_s = lease_s
        self._topic_entries = topic_entries
        self._dead_entries = dead_entries
        self._entries_read = entries_read
        self._what = f"commit of {group}"
        self._closed = False

    def close(self) -> None:
        """Stop retrying."""
        self._closed = True

    async def submit(self, worked: Sequence[AppliedBatch]) -> list[list[Any]]:
        """Commit the batches and return one reply for each: `refused` if the server accepts the others but not that
        one.
        """
        for each in worked:
            for poison in each.work.poison:
                await self._dead_letter(each.part, poison)
        large = [each.work.commit.is_large for each in worked]
        together = [self._call_of(each) for each, is_large in zip(worked, large, strict=True) if not is_large]
        replies = iter(await self._submit_together(together) if together else ())
        return [
            await self._submit_large(each) if is_large else next(replies)
            for each, is_large in zip(worked, large, strict=True)
        ]

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

    async def _submit_large(self, each: AppliedBatch) -> list[Any]:
        try:
            part = each.part
            after = Lease(part.number, part.token, part.offset, part.watermark)
            return await self._commit_in_parts(after, each.work.commit, partial(self._call_of, each))
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
            call = self._call(
                one,
                token=lease.token,
                begin=lease.offset,
                end=lease.offset,
                watermark=lease.watermark,
                owed=owed,
                owes=owes,
            )
            reply = await self._run(call)
            if reply[0] not in _DONE:
                return reply
            lags += reply[2:]
            owed = owes
        return [b"ok", lease.offset.encode(), *lags]

    # --- further writes ----------------------------------------------------------------------------------------------

    async def recover_rollback(self, part: Partition, lease: Lease, commit: scripts.Commit) -> None:
        """Commit the events that a fail-over lost, at the server's current offset.

        No offset shows whether they are written, so they are owed like a large commit: a lost reply repeats nothing.
        """
        call = partial(self._call, token=part.token, begin=lease.offset, end=lease.offset, watermark=lease.watermark)
        reply = await self._commit_in_parts(lease, commit, call)
        if reply[0] != b"ok":
            log.error("%s partition %d: runs that lost events continue: %s", self._group, part.number, reply)

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

    def _call_of(self, each: AppliedBatch, commit: scripts.Commit | None = None, owes: str = "") -> scripts.ScriptCall:
        return self._call(
            each.work.commit if commit is None else commit,
            token=each.part.token,
            begin=each.begin,
            end=each.part.offset,
            watermark=each.part.watermark,
            entries=len(each.work.entries),
            size=each.work.size,
            owes=owes,
        )

    def _call(
        self,
        commit: scripts.Commit,
        *,
        token: str,
        begin: str,
        end: str,
        watermark: str,
        entries: int = 0,
        size: int = 0,
        owed: str = "",
        owes: str = "",
    ) -> scripts.ScriptCall:
        return commit.call(
            token=token,
            ttl_ms=round(self._lease_s * 1000),
            begin=begin,
            end=end,
            watermark=watermark,
            entries=entries,
            size=size,
            mirror=self._group,
            entries_read=self._entries_read,
            topic_entries=self._topic_entries,
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
        return scripts.Commit(self._keys.lease(partition, self._group), self._keys.topic(partition, self._topic))

    async def _dead_letter(self, part: Partition, poison: Poison) -> None:
        """Write the poison frame to the dead stream before the commit: a crash in between may duplicate it but never
        lose it.
        """
        entry = DeadLetter(
            reason=poison.reason,
            stage=self._group,
            stream=part.stream,
            entry=poison.entry_id,
            bytes=poison.frame,
            run=poison.run,
            size=poison.size,
        )
        await dead_letter(self._server, self._keys, entry, most=self._dead_entries, stop_if=self._is_closed)
