"""The load: the chaos's runs, without faults, started at an even rate."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any
from zlib import crc32

from tests.chaos.stories import Stage

ENDED = {b"completed", b"incomplete", b"failed", b"cancelled"}
_LOOK_S = 0.2
_AT_ONCE = 16
"""Runs that begin between two looks: a loaded machine takes seconds for them, and an ended run is soon forgotten."""


class Load:
    """Starts runs and detects their ends."""

    def __init__(self, client: Any, stage: Stage, partitions: int) -> None:
        self._client = client
        self._stage = stage
        self._prefix = "soak"
        self._partitions = partitions
        self._cancelling: set[asyncio.Task[None]] = set()
        self.open: set[str] = set()
        self.begun = 0
        self.outcomes: Counter[str] = Counter()

    @property
    def over(self) -> int:
        """Runs that have ended."""
        return self.outcomes.total()

    async def saturate(self, open_runs: int, seconds: float) -> float:
        """Keep this many runs open for this long. Returns the runs that ended per second in the second half of the
        time.
        """
        clock = asyncio.get_running_loop().time
        begin = clock()
        half: tuple[float, int] | None = None
        while (now := clock()) < begin + seconds:
            if half is None and now > begin + seconds / 2:
                half = now, self.over
            for _ in range(min(open_runs - len(self.open), _AT_ONCE)):
                await self._begin()
            await asyncio.sleep(_LOOK_S)
            await self.look()
        since, before = half or (begin, 0)  # a starved process may not have checked in between
        return (self.over - before) / (clock() - since)

    async def keep(self, rate: float, open_runs: int, until: float) -> None:
        """Start ``rate`` runs a second until this time of the loop's clock; never more than ``open_runs`` are open."""
        clock = asyncio.get_running_loop().time
        begin, due = clock(), 0
        while (now := clock()) < until:
            while due < (now - begin) * rate:
                due += 1
                if len(self.open) < open_runs:
                    await self._begin()
            await asyncio.sleep(_LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Detect which runs have ended."""
        runs = list(self.open)
        pipe = self._client.pipeline(transaction=False)
        for run in runs:
            pipe.hget(self._key(run), "status")
        for run, status in zip(runs, await pipe.execute() if runs else [], strict=True):
            if status in ENDED:
                self.open.discard(run)
                self.outcomes[status.decode()] += 1

    async def status(self, run: str) -> str:
        """The run's status in its hash, and the planned answer of its provider."""
        fields = {
            k.decode(): v.decode(errors="replace")[:80] for k, v in (await self._client.hgetall(self._key(run))).items()
        }
        return f"{self._stage.scenes[run].story.fate}; {fields or 'no hash'}"

    def _key(self, run: str) -> str:
        return f"{self._prefix}:{{{crc32(run.encode()) % self._partitions}}}:run:{run}"

    async def stop(self) -> None:
        """Start nothing more, and finish the planned cancels."""
        await asyncio.gather(*self._cancelling)

    async def _begin(self) -> None:
        scene = self._stage.next()
        self.begun += 1
        self.open.add(scene.story.run)
        await self._send(scene.request)
        if scene.cancel_after_s is not None:
            task = asyncio.create_task(self._cancel(scene.story.run, scene.cancel_after_s))
            self._cancelling.add(task)
            task.add_done_callback(self._cancelling.discard)

    async def _cancel(self, run: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        await self._send({"type": "cancel", "run": run, "reason": "enough"})

    async def _send(self, request: dict[str, Any]) -> None:
        await self._client.xadd(f"{self._prefix}:requests", {"__data__": json.dumps(request)})
