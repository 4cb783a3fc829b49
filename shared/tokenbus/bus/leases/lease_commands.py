"""The commands of one worker about its group's leases, and what the server replies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenbus.bus import scripts
from tokenbus.bus.keys import InternalTopic, Keys, SubscribedTopic
from tokenbus.bus.leases.lease import Lease
from tokenbus.bus.server.run_scripts import run_each, run_script, run_scripts
from tokenbus.bus.server.server import Server


class LeaseCommands:
    """The commands. Each raises redis-py's errors."""

    def __init__(
        self,
        server: Server,
        keys: Keys,
        *,
        group: str,
        topic: InternalTopic | SubscribedTopic,
        worker: str,
        ttl_ms: int,
        start: str,
    ) -> None:
        """``start``: where a group that has no offset yet begins to read."""
        self._server = server
        self._keys = keys
        self._group = group
        self._topic: InternalTopic | SubscribedTopic = topic
        self._worker = worker
        self._ttl_ms = ttl_ms
        self._start = start
        self._partitions_at_start = keys.partitions

    async def sign_on(self) -> list[str]:
        """Sign on for the time of a lease; return all members."""
        present = scripts.present(self._keys.members(self._group), member=self._worker, ttl_ms=self._ttl_ms)
        found: list[bytes] = await run_script(self._server, present)
        return [member.decode() for member in found]

    async def sign_off(self) -> None:
        """Leave the member set."""
        await self._server.client.zrem(self._keys.members(self._group), self._worker)

    async def acquire(self, partitions: Sequence[int]) -> list[Lease | Exception | None]:
        """Acquire these partitions. For each: its lease; None if another worker owns it; the error if one of its keys
        has the wrong type.
        """
        calls = [
            scripts.acquire(
                self.lease_key(partition),
                self.stream(partition),
                owner=self._worker,
                ttl_ms=self._ttl_ms,
                # Partitions that are added later are read from their beginning.
                start=self._start if partition < self._partitions_at_start else "0-0",
                mirror=self._group,
            )
            for partition in partitions
        ]
        return [
            reply if isinstance(reply, Exception) else _lease(partition, *reply)
            for partition, reply in zip(partitions, await run_each(self._server, calls), strict=True)
        ]

    async def renew(self, leases: Sequence[Lease]) -> list[str | Exception | None]:
        """Renew these leases. For each: its group's offset; None if the lease is lost; the error if one of its keys has
        the wrong type.
        """
        calls = [
            scripts.renew(self.lease_key(x.partition), self.stream(x.partition), token=x.token, ttl_ms=self._ttl_ms)
            for x in leases
        ]
        replies: list[Any] = await run_each(self._server, calls)
        return [reply if isinstance(reply, Exception) else reply.decode() if reply else None for reply in replies]

    async def release(self, leases: Sequence[Lease]) -> None:
        """Release these leases. Does nothing for one that is lost."""
        await run_scripts(
            self._server, [scripts.release(self.lease_key(lease.partition), token=lease.token) for lease in leases]
        )

    def lease_key(self, partition: int) -> str:
        """The key of a partition's lease."""
        return self._keys.lease(partition, self._group)

    def stream(self, partition: int) -> str:
        """The key of the stream that the group reads."""
        return self._keys.topic(partition, self._topic)


def _lease(partition: int, token: bytes, offset: bytes, watermark: bytes) -> Lease | None:
    return Lease(partition, token.decode(), offset.decode(), watermark.decode()) if token else None
