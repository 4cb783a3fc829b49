"""What the reply to a commit means for its partition: continue, wait for a key to be fixed, or drop the state."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from tokenbus.bus.server.error_replies import is_alien
from tokenbus.bus.stage.committer import Committer
from tokenbus.bus.stage.loading.owned_partitions import OwnedPartitions
from tokenbus.bus.stage.partition import Partition
from tokenbus.bus.stage.prepared_commit import PreparedCommit
from tokenbus.bus.stage.quarantine import CAREFUL_LOADS, TRIES_FIELD

log = logging.getLogger(__name__)


class CommitReplies:
    """Handles the replies to the commits of one worker's partitions."""

    def __init__(
        self, partitions: OwnedPartitions, commits: Committer, *, group: str, lag_bytes: int, shun_s: float
    ) -> None:
        """``lag_bytes``: a partition whose outputs lag by more is paused. ``shun_s``: how long this worker leaves a
        partition to others whose commit the server refuses.
        """
        self._partitions = partitions
        self._journals = partitions.journals
        self._leases = partitions.leases
        self._commits = commits
        self._group = group
        self._lag_bytes = lag_bytes
        self._shun_s = shun_s

    async def handle(self, part: Partition, work: PreparedCommit, reply: list[Any]) -> None:
        """Handle the reply to a commit of this partition, while its lock is held."""
        if reply[0] in (b"ok", b"already"):
            self._journals[part.number].keep(part.offset, work, asyncio.get_running_loop().time())
            self._leases.committed(part.number, part.offset)
            part.loads = 0
            self._partitions.blocked_keys.discard(part.number)
            part.paused = any(lag > self._lag_bytes for lag in reply[2:])
            return
        if reply[0] == b"refused" and is_alien(error := reply[1]):
            self._partitions.block(part, str(error))
            return
        # Another owner committed, the server rolled back, or the commit cannot succeed: this worker's state is invalid.
        log.warning("%s partition %d: dropped: %s", self._group, part.number, reply)
        given_up = part.isolated.exhausted
        try:
            if reply[0] == b"refused" and not given_up:
                await self._quarantine(part)
            if reply[0] == b"moved" and self._journals[part.number].is_ahead_of(reply[1].decode()):
                await self._partitions.recover_rollback(part)
        finally:
            self._partitions.drop(part, shun_s=self._shun_s if reply[0] == b"refused" and given_up else 0)

    async def _quarantine(self, part: Partition) -> None:
        """The server refuses this commit. Process the entries one at a time next; if it was a single entry already,
        quarantine it and end its runs so that the others continue.
        """
        if part.loads > CAREFUL_LOADS:
            await self._commits.note(part, TRIES_FIELD, part.isolated.refused().stored())
        else:
            await self._commits.note(part, "loads", CAREFUL_LOADS)
