"""Which turns wait in front of their provider: for a slot, a limit or the delay of a retry.

A fetcher marks an entry of `turns` as not begun while the run waits there. So the queue itself distinguishes a waiting
run from one whose provider is called, and no service writes extra data for the console.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias, cast

import msgspec
from redis.exceptions import NoPermissionError, ResponseError

from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts.work_queue import NOBODY
from tokenbus.bus.server.server import Server
from tokenbus.events.frames import TurnWork, turn_decoder

GROUP = "fetcher"
MAX_ENTRIES = 2000
"""Entries of a partition to read at each look. Later entries count as begun."""
EARLY_MS = 5000
"""Entries are looked for from this long before their run was accepted: in a Cluster, two clocks gave the times."""
_MAX_REMEMBERED = 20_000
_Place: TypeAlias = tuple[int, bytes]
"""Partition and entry."""


class TurnQueue:
    """Looks at the queues of all partitions."""

    def __init__(self, server: Server, keys: Keys) -> None:
        self._server = server
        self._keys = keys
        self._entries: dict[_Place, Mapping[str, TurnWork]] = {}
        """Entries that were read before: an entry never changes."""

    async def waiting(self, accepted_ms: Mapping[str, int]) -> dict[str, TurnWork]:
        """Of these runs, by the time of their acceptance, those whose turn has not begun, with the turn.

        Raises redis-py's errors.
        """
        since: dict[int, int] = {}
        for run, at_ms in accepted_ms.items():
            p = self._keys.partition_of(run)
            since[p] = min(since.get(p, at_ms), at_ms)
        if not since:
            return {}
        pipe = self._server.client.pipeline(transaction=False)
        for p, at_ms in since.items():
            stream = self._keys.topic(p, "turns")
            pipe.xpending_range(stream, GROUP, min=max(0, at_ms - EARLY_MS), max="+", count=MAX_ENTRIES)
            pipe.xinfo_groups(stream)
        replies: list[Any] = await pipe.execute(raise_on_error=False)
        unbegun: list[_Place] = []
        unread: dict[int, bytes] = {}
        for n, p in enumerate(since):
            pending, groups = map(_listed, replies[2 * n : 2 * n + 2])
            unbegun += [(p, entry["message_id"]) for entry in pending if _waits(entry)]
            unread[p] = next((each["last-delivered-id"] for each in groups if each["name"] == GROUP.encode()), b"0")
        found = await self._read(unbegun, unread)
        return {run: work for works in found for run, work in works.items() if run in accepted_ms}

    async def _read(
        self, unbegun: list[tuple[int, bytes]], unread: Mapping[int, bytes]
    ) -> list[Mapping[str, TurnWork]]:
        """The turns of these entries, and of those behind the last one that a fetcher got."""
        if len(self._entries) > _MAX_REMEMBERED:
            self._entries = {}
        missing = [place for place in unbegun if place not in self._entries]
        pipe = self._server.client.pipeline(transaction=False)
        for p, entry in missing:
            pipe.xrange(self._keys.topic(p, "turns"), entry, entry)
        for p, last in unread.items():
            pipe.xrange(self._keys.topic(p, "turns"), f"({last.decode()}", "+", count=MAX_ENTRIES)
        replies: list[Any] = await pipe.execute(raise_on_error=False)
        for place, reply in zip(missing, replies, strict=False):
            self._entries[place] = _turns(reply)
        return [self._entries[place] for place in unbegun] + [_turns(reply) for reply in replies[len(missing) :]]


def _waits(entry: Mapping[str, Any]) -> bool:
    return entry["times_delivered"] == 0 or entry["consumer"] == NOBODY.encode()


def _turns(reply: Any) -> dict[str, TurnWork]:
    found: dict[str, TurnWork] = {}
    for _, fields in _listed(reply):
        for name, data in fields.items():
            try:
                found[name.decode()] = turn_decoder.decode(data)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue  # a poison entry, which its fetcher reports
    return found


def _listed(reply: Any) -> Iterable[Any]:
    """The answer; of a stream that is missing or may not be read, none. Raises the server's other errors."""
    if isinstance(reply, (ResponseError, NoPermissionError)):
        return ()
    if isinstance(reply, Exception):
        raise reply
    return cast("list[Any]", reply)
