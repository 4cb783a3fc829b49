"""A change of the number of partitions during the faults; the command itself may be killed halfway."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from tests.chaos.lost_connections import is_lost
from tests.chaos.record import Change
from tests.waiting import eventually

NUMBER = 7
"""Neither divides the initial number of a round, nor is divided by it."""
_TRIES = 40
_FENCED_S = 60.0


class Repartition:
    """One change. Call `begin` during the chaos, and `finish` after it."""

    def __init__(self, client: Any, prefix: str, env: Mapping[str, str], chance: random.Random) -> None:
        self._client = client
        self._prefix = prefix
        self._env = env
        self._chance = chance
        self.done = False

    async def begin(self, after_s: float) -> None:
        """Retry until the command reports success. The first try may be killed."""
        await asyncio.sleep(after_s)
        killed_after_s = self._chance.choice((None, self._chance.uniform(0.3, 3.0)))
        for _ in range(_TRIES):
            if await self._command(str(NUMBER), "--wait", "8", killed_after_s=killed_after_s) == 0:
                self.done = True
                return
            killed_after_s = None
            if await self._placing() == NUMBER:  # the command was killed, or lost its last reply, after it had changed
                # the placement
                self.done = True
                return
            await self._command("--abandon")
            await asyncio.sleep(0.5)

    async def finish(self) -> bool:
        """Wait until no worker can place by the old number; return whether this happened."""
        with suppress(AssertionError):
            await eventually(self._is_fenced, timeout=_FENCED_S)
            return True
        return False

    async def result(self, fresh: list[str]) -> Change:
        """The facts for the judge. ``fresh``: runs that were requested after the change."""
        return Change(NUMBER, await self._placing(), fresh)

    async def _is_fenced(self) -> bool:
        try:
            epoch = await self._client.hget(f"{self._prefix}:meta", "epoch")
            leases = [f"{self._prefix}:{{{n}}}:lease:parser" for n in range(NUMBER)]
            return all([await self._client.hget(lease, "epoch") == epoch for lease in leases])
        except Exception as e:
            if not is_lost(e):
                raise
            return False

    async def _placing(self) -> int:
        while True:
            try:
                return int(await self._client.hget(f"{self._prefix}:meta", "partitions") or 0)
            except Exception as e:
                if not is_lost(e):
                    raise
                await asyncio.sleep(0.1)

    async def _command(self, *arguments: str, killed_after_s: float | None = None) -> int:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tokenbus_services.cli", "repartition", *arguments),
            env=dict(self._env),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            async with asyncio.timeout(killed_after_s):
                return await process.wait()
        except TimeoutError:
            process.kill()
            return await process.wait()
