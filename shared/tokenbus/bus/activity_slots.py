"""Reads what a deployment did lately, slot by slot: each finished slot once."""

from __future__ import annotations

from typing import Any

from tokenbus.bus.activity import Activity, activity_of, slot_of
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server

UNFINISHED = 1
"""Newest slots that may still grow: what is counted later goes into a later one."""


class ActivitySlots:
    """The slots of a recent time, by number. Empty until the first `read`."""

    def __init__(self, server: Server, keys: Keys, *, kept: int) -> None:
        """``kept``: how many slots before the present one."""
        self._server = server
        self._keys = keys
        self._kept = kept
        self.slots: dict[int, Activity] = {}

    async def read(self) -> None:
        """Read the slots that are not known or may have grown. Raises redis-py's errors."""
        now = slot_of(self._server.clock.now_ms())
        recent = range(now - self._kept, now + 1)
        wanted = [slot for slot in recent if slot >= now - UNFINISHED or slot not in self.slots]
        pipe = self._server.client.pipeline(transaction=False)
        for slot in wanted:
            pipe.hgetall(self._keys.activity(slot))
        replies: list[Any] = await pipe.execute()
        for slot, fields in zip(wanted, replies, strict=True):
            self.slots[slot] = activity_of(fields)
        for slot in [slot for slot in self.slots if slot < now - self._kept]:
            del self.slots[slot]

    @property
    def newest(self) -> int:
        """The number of the newest slot; 0 before the first `read`."""
        return max(self.slots, default=0)
