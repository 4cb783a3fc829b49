"""What this parser's runs did, for the console, `tokenbus doctor` and `top`.

Counted in memory, and added to the deployment's counts every few seconds.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from tokenbus.bus.activity import (
    ATTEMPTS,
    CHARACTERS,
    ENDED,
    ERRORS,
    FAILED,
    LIMITED,
    Failure,
    bucket_field,
    failure_of,
    open_field,
    provider_field,
    slot_of,
)
from tokenbus.bus.keys import Keys
from tokenbus.bus.liveness import Liveness, stop_task
from tokenbus.bus.scripts.activity import count_activity
from tokenbus.bus.scripts.script import MAX_VALUES
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus.core.run.attempts import AttemptReport
from tokenbus.core.run.state import RunState
from tokenbus.events.public import RunEnd, RunEvent, RunFailedEvent
from tokenbus_services.runtime.metrics import KnownModels, write_regularly
from tokenbus_services.settings import Settings

MAX_FAILURES = 16
"""Maximum kinds of failures that are counted separately between two writes. Models and codes are external input."""


class ActivityCounter:
    """An observer of runs. Call `open`, then `close`."""

    def __init__(
        self,
        server: Server,
        keys: Keys,
        settings: Settings,
        *,
        characters: Callable[[], int],
        owned: Callable[[], Sequence[int]],
    ) -> None:
        """``characters``: how many this worker has published. ``owned``: the partitions that it processes."""
        self._server = server
        self._keys = keys
        self._models = KnownModels(settings)
        self._characters = characters
        self._characters_reported = 0
        self._owned = owned
        self._counts: Counter[str] = Counter()
        self._failures: Counter[Failure] = Counter()
        self._task: asyncio.Task[None] | None = None

    async def open(self, liveness: Liveness) -> None:
        """Begin to write."""
        self._task = liveness.start(write_regularly(self.write), name="activity")

    async def close(self) -> None:
        """Stop; what the last seconds brought is not written."""
        await stop_task(self._task)

    def attempt_over(self, state: RunState, report: AttemptReport) -> None:
        provider, model = self._models.label(report.provider, report.model, ok=report.outcome == "ok")
        self._counts[provider_field(provider, model, ATTEMPTS)] += 1
        if report.outcome == "error":
            self._counts[provider_field(provider, model, ERRORS)] += 1
            if report.error and report.error.kind == "rate_limit":
                self._counts[provider_field(provider, model, LIMITED)] += 1
            if report.error and (failure := failure_of(provider, report.model, report.error)):
                known = failure in self._failures or len(self._failures) < MAX_FAILURES
                self._failures[failure if known else failure.merged] += 1
        if report.called_ms and report.answered_ms:
            self._counts[bucket_field(provider, model, max(0, report.answered_ms - report.called_ms))] += 1

    def lifecycle(self, state: RunState, event: RunEvent) -> None:
        """Count one run, if this is its end."""
        if isinstance(event, RunEnd):
            self._counts[ENDED] += 1
            self._counts[FAILED] += isinstance(event, RunFailedEvent)

    async def write(self) -> None:
        """Add what was counted since the last call. Raises redis-py's errors; what was counted is then dropped."""
        characters = self._characters()
        counts, self._counts = self._counts, Counter()
        counts[CHARACTERS], self._characters_reported = characters - self._characters_reported, characters
        failures, self._failures = self._failures, Counter()
        levels = await self._open_runs()
        fields = [(name, count) for name, count in counts.items() if count]
        fields += [(failure.field, count) for failure, count in failures.items()]
        if not fields and not levels:
            return
        key = self._keys.activity(slot_of(self._server.clock.now_ms()))
        for at in range(0, max(1, len(fields)), MAX_VALUES // 2):
            some = dict(fields[at : at + MAX_VALUES // 2])
            await run_script(self._server, count_activity(key, some, levels if at == 0 else {}))

    async def _open_runs(self) -> dict[str, int]:
        """The open runs of this worker's partitions that have any."""
        owned = list(self._owned())[: MAX_VALUES // 2]
        if not owned:
            return {}
        pipe = self._server.client.pipeline(transaction=False)
        for partition in owned:
            pipe.zcard(self._keys.open_runs(partition))
        counts: list[Any] = await pipe.execute()
        return {open_field(partition): count for partition, count in zip(owned, counts, strict=True) if count}
