"""What the writes that matter wait for, besides the server's own memory: its replicas, or the disk."""

from __future__ import annotations

from typing import Self

import msgspec
from redis.exceptions import RedisError

from tokenbus.events.requests import DurabilityLevel

WAIT_MS = 1000
"""How long one command waits on the server. It may be sent again."""
NO_DURABILITY = "null"
"""What a deployment tells clients whose durable requests it refuses."""
DISK_SINCE = (7, 2)
"""First version of Redis, and of Valkey, that has WAITAOF."""


class NotReplicated(RedisError):
    """The server has the write, and too few replicas or no disk have it in time. It may be sent again."""


class Durability(msgspec.Struct, frozen=True):
    """Where a deployment's writes must be that wait."""

    default: DurabilityLevel = "server"
    """Of requests that name none."""
    replicas: int = 1
    disk: bool = False
    """Flushed to disk in the append-only file of the server and of this number of replicas."""

    @classmethod
    def decode(cls, text: bytes | None) -> Self | None:
        """Read what `encoded` wrote; None for `NO_DURABILITY`, if nothing was said, or for what is not known here."""
        try:
            return msgspec.json.decode(text, type=cls) if text else None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None

    @property
    def encoded(self) -> str:
        """As the deployment's processes tell each other."""
        return msgspec.json.encode(self).decode()

    @property
    def command(self) -> tuple[str | int, ...]:
        """Waits for all earlier writes of its connection (https://valkey.io/commands/wait/)."""
        return ("WAITAOF", 1, self.replicas, WAIT_MS) if self.disk else ("WAIT", self.replicas, WAIT_MS)

    def check(self, reply: int | list[int]) -> None:
        """Raises NotReplicated if this reply of `command` says so."""
        disks, replicas = reply if isinstance(reply, list) else (1, reply)
        if disks < 1:
            raise NotReplicated("the write is not on the server's disk yet")
        if replicas < self.replicas:
            raise NotReplicated(f"the write is on {replicas} of {self.replicas} replicas")
