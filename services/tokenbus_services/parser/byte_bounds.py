"""Bounds in bytes of what a partition keeps: of each of its topics, and of its ended runs together, oldest first.

A topic's memory is what the server says of its stream. An ended run's is measured once, when it is first seen on the
list of ended runs: its log and its hash do not grow any more, and the order of its tree hardly does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts.retention import forget
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus.events.sessions import session_run
from tokenbus_services.runtime.deployment_snapshot import checked

LESS = 0.125
"""What exceeds its bound is made this share smaller than that, so that it is not trimmed with each look."""
LEAST_ENTRIES = 1_000
"""A topic keeps more than a subscriber reads at once, so that it can tell what it missed."""
MEASURED = 500
"""Ended runs that are measured with one look."""
FORGOTTEN = 100
"""Ended runs that one command forgets."""
STEPS = 8
"""Commands of one look; the next one continues."""


class _Run(msgspec.Struct, frozen=True):
    ended_ms: int
    run: str
    size: int


class PartitionBytes:
    """What one partition keeps. Call `look` from time to time."""

    def __init__(self, server: Server, keys: Keys, partition: int, streams: Sequence[str]) -> None:
        self._server = server
        self._keys = keys
        self._ended_runs = keys.ended_runs(partition)
        self._streams = streams
        self._runs = deque[_Run]()
        """The ended runs, the oldest first."""
        self._newest: tuple[int, set[str]] = 0, set()
        """The time of the newest one, and all of that time: more may come."""
        self.total = 0
        """Bytes of the runs above."""

    async def trim_topics(self, most: int) -> int:
        """Shorten each topic that uses more bytes than this; how many entries that were. Raises redis-py's errors."""
        pipe = self._server.client.pipeline(transaction=False)
        for stream in self._streams:
            pipe.memory_usage(stream)
            pipe.xlen(stream)
        replies: list[Any] = [checked(reply) for reply in await pipe.execute(raise_on_error=False)]
        trimmed = 0
        for stream, used, length in zip(self._streams, replies[0::2], replies[1::2], strict=True):
            if used and used > most and length > LEAST_ENTRIES:
                stay = max(LEAST_ENTRIES, int(length * (1 - LESS) * most / used))
                trimmed += await self._server.client.xtrim(stream, maxlen=stay, approximate=True)
        return trimmed

    async def trim_runs(self, most: int, *, now_ms: int, keep_ms: int, hold_ms: int) -> int:
        """Forget ended runs while all of them use more bytes than this; how many. Those of sessions do not count; those
        that wait for their recorder count, and stay. ``keep_ms``: after this they expire. Raises redis-py's errors.
        """
        await self._measure()
        while self._runs and self._runs[0].ended_ms + keep_ms < now_ms:
            self.total -= self._runs.popleft().size
        if self.total <= most:
            return 0
        gone, stay = 0, list[_Run]()
        for _ in range(STEPS):
            if self.total <= (1 - LESS) * most or not self._runs:
                break
            some = [self._runs.popleft() for _ in range(min(FORGOTTEN, len(self._runs)))]
            names = [one.run for one in some]
            keys = [self._keys.kept_of(run) for run in names]
            count = await run_script(
                self._server, forget(self._ended_runs, keys, runs=names, held_after=now_ms - hold_ms)
            )
            gone += count
            left = some if not count else await self._still_there(some) if count < len(some) else []
            stay += left
            self.total -= sum(one.size for one in some) - sum(one.size for one in left)
        self._runs.extendleft(reversed(stay))
        return gone

    async def _measure(self) -> None:
        """Take in the runs that have ended since the last look."""
        since, known = self._newest
        client = self._server.client
        found: list[tuple[bytes, float]] = await client.zrangebyscore(
            self._ended_runs, since, "+inf", start=0, num=MEASURED + len(known), withscores=True
        )
        fresh = [(run.decode(), int(ended)) for run, ended in found if run.decode() not in known]
        if not fresh:
            return
        newest = fresh[-1][1]
        same = {run for run, ended in fresh if ended == newest}
        self._newest = newest, same | known if newest == since else same
        fresh = [(run, ended) for run, ended in fresh if session_run(run) is None]
        pipe = client.pipeline(transaction=False)
        for run, _ in fresh:
            for key in self._keys.kept_of(run):
                pipe.memory_usage(key)
        sizes: list[Any] = [checked(reply) for reply in await pipe.execute(raise_on_error=False)] if fresh else []
        for (run, ended), *of_keys in zip(fresh, sizes[0::3], sizes[1::3], sizes[2::3], strict=True):
            size = sum(each or 0 for each in of_keys)
            self._runs.append(_Run(ended, run, size))
            self.total += size

    async def _still_there(self, runs: Sequence[_Run]) -> list[_Run]:
        pipe = self._server.client.pipeline(transaction=False)
        for one in runs:
            pipe.exists(self._keys.run(one.run))
        there: list[Any] = await pipe.execute()
        return [one for one, is_there in zip(runs, there, strict=True) if is_there]
