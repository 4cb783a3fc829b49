"""Writes of a stage to its partitions (commits, dead letters, lease fields), retried until the server accepts them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec
from redis.exceptions import RedisError

from tokenbus.bus import scripts
from tokenbus.bus.dead_letters import DeadLetter, dead_letter
from tokenbus.bus.keys import Keys
from tokenbus.bus.leases.lease import Lease
from tokenbus.bus.server.retry import ISOLATED_TRIES, retry_until_available
from tokenbus.bus.server.run_scripts import run_script, run_scripts
from tokenbus.bus.server.server import Server
from tokenbus.bus.stage.partition import Partition
from tokenbus.bus.stage.prepared_commit import Poison, PreparedCommit

log = logging.getLogger(__name__)


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
        lease_s: float,
        topic_entries: int,
        dead_entries: int,
        entries_read: bool,
    ) -> None:
        """``entries_read``: the server supports XGROUP SETID … ENTRIESREAD (Redis 7)."""
        self._server = server
        self._keys = keys
        self._group = group
        self._lease_s = lease_s
        self._topic_entries = topic_entries
        self._dead_entries = dead_entries
        self._entries_read = entries_read
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
        calls = [
            self._call(
                each.part,
                each.work.commit,
                begin=each.begin,
                end=each.part.offset,
                watermark=each.part.watermark,
                entries=len(each.work.entries),
                size=each.work.size,
            )
            for each in worked
        ]
        what = f"commit of {self._group}"
        try:
            return await retry_until_available(
                self._server, lambda: run_scripts(self._server, calls), what=what, stop_if=self._is_closed
            )
        except (RedisError, OSError):
            if self._closed:
                raise
        # At least one call fails. Send each alone so that the others go through; those already committed reply
        # `already`.
        replies: list[list[Any]] = []
        for call in calls:
            try:
                replies.append(
                    await retry_until_available(
                        self._server,
                        lambda call=call: run_script(self._server, call),
                        what=what,
                        stop_if=self._is_closed,
                        tries=ISOLATED_TRIES,
                    )
                )
            except (RedisError, OSError) as e:
                if self._closed:
                    raise
                replies.append([b"refused", e])
        return replies

    async def recover_rollback(self, part: Partition, lease: Lease, commit: scripts.Commit) -> None:
        """Commit the events that a fail-over lost, at the server's current offset."""
        call = self._call(
            part, commit, begin=lease.offset, end=lease.offset, watermark=lease.watermark, entries=0, size=0
        )
        reply = await retry_until_available(
            self._server,
            lambda: run_script(self._server, call),
            what=f"lost writes of {self._group}",
            stop_if=self._is_closed,
        )
        if reply[0] != b"ok":
            log.error("%s partition %d: runs that lost events continue: %s", self._group, part.number, reply)

    async def note(self, part: Partition, field: str, value: str | int) -> None:
        """Set a field of the partition's lease hash. The next owner reads it."""
        await retry_until_available(
            self._server,
            lambda: run_script(self._server, scripts.note(part.lease_key, field, value)),
            what=f"note of {self._group}",
            stop_if=self._is_closed,
        )

    def _is_closed(self) -> bool:
        return self._closed

    def _call(
        self,
        part: Partition,
        commit: scripts.Commit,
        *,
        begin: str,
        end: str,
        watermark: str,
        entries: int,
        size: int,
    ) -> scripts.ScriptCall:
        return commit.call(
            token=part.token,
            ttl_ms=round(self._lease_s * 1000),
            begin=begin,
            end=end,
            watermark=watermark,
            entries=entries,
            size=size,
            mirror=self._group,
            entries_read=self._entries_read,
            topic_entries=self._topic_entries,
        )

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
