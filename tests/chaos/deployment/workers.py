"""The worker processes of a round: made by a fork server, faulted by the chaos, stopped in order at the end."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from tests.chaos.deployment import inside
from tests.chaos.deployment.inside import END, FREEZE, REPORT
from tests.chaos.record import Exit
from tests.e2e.fleet import CHAINED, SEPARATE, Kind
from tests.fork_server import Forked, ForkServer, new_server
from tests.waiting import eventually

FLEETS: tuple[tuple[Kind, ...], ...] = (SEPARATE, CHAINED, (*SEPARATE, *CHAINED))
"""The workers between requests and public topics, by fleet."""
BESIDE: tuple[Kind, ...] = ("tools", "policy")
"""The other workers of each round."""
STOP_S = 30.0
"""Longest time that an orderly stop may take; the server may be unavailable for a part of it."""


class Worker:
    def __init__(self, kind: Kind, process: Forked, log: Path) -> None:
        self.kind: Kind = kind
        self.pid = process.pid
        self.log = log
        self._process = process
        self.frozen = False
        self.task_fault_at: float | None = None
        """When one of its tasks was ended or frozen, after which it has to exit."""
        self.asked: int | None = None
        """The signal that was sent to end it."""
        self.asked_at: float | None = None

    @property
    def status(self) -> int | None:
        """As in `subprocess`: None while it runs, negative for a signal."""
        return self._process.returncode

    @property
    def ready(self) -> bool:
        return f"ready {self.kind} " in self.log.read_text(errors="replace")

    @property
    def well(self) -> bool:
        """Whether it runs and was not asked to stop."""
        return self.status is None and self.asked is None and not self.frozen and self.task_fault_at is None

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def freeze(self) -> None:
        self.frozen = True
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.frozen = False
        self._signal(signal.SIGCONT)

    def fault_task(self, how: Literal["ends", "freezes"]) -> None:
        """End or freeze one of its long-lived tasks."""
        self.task_fault_at = time.monotonic()
        self._signal(END if how == "ends" else FREEZE)

    async def stop(self) -> None:
        """Send SIGTERM and wait; kill -9 after the timeout, which its `Exit` then records."""
        self.thaw()
        self._end(signal.SIGTERM)
        try:
            await self._process.wait(timeout=STOP_S)
        except AssertionError:
            self._signal(signal.SIGKILL)
            await self._process.wait()

    def report_tasks(self) -> None:
        """Make it log where each task waits."""
        self._signal(REPORT)

    def exit(self) -> Exit:
        assert self.status is not None
        return Exit(self.kind, self.pid, self.asked, self.status, self.ready, self.log.name, self._task_fault_s)

    @property
    def _task_fault_s(self) -> float | None:
        """Seconds that it had to exit by itself after the fault."""
        return None if self.task_fault_at is None else (self.asked_at or time.monotonic()) - self.task_fault_at

    def _end(self, number: signal.Signals) -> None:
        if self.asked is None:
            self.asked_at = time.monotonic()
            self.asked = number
        self._signal(number)

    def _signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)


class Workers:
    """All workers of a round. A context manager; it kills what still runs at its end."""

    def __init__(
        self,
        directory: Path,
        env: Mapping[str, str],
        build: str | None = None,
        *,
        kinds: tuple[Kind, ...],
        clocks: random.Random | None = None,
    ) -> None:
        """``kinds``: the kinds of workers in the round. ``clocks``: the source of chance by which a third of the
        workers have clocks that jump.
        """
        self.kinds = kinds
        self._clocks = clocks
        self._directory = directory
        self._env = dict(env)
        self._build = build or ""
        self._server: ForkServer | None = None
        self.all: list[Worker] = []

    async def __aenter__(self) -> Self:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._server = new_server(inside.__name__)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server
        await asyncio.to_thread(self._server.close)

    def start(self, kind: Kind) -> Worker:
        """Start one more worker; it may not be ready yet."""
        assert self._server
        log = self._directory / f"{len(self.all)}-{kind}.log"
        log.touch()
        process = self._server.start(
            *("worker", kind, "--port", "0"),
            env={**os.environ, **self._env},
            stdout=log,
            stderr=log,
            prepare=(f"{inside.__name__}:{inside.prepare.__name__}", self._build, self._clock()),
        )
        worker = Worker(kind, process, log)
        self.all.append(worker)
        return worker

    def _clock(self) -> str:
        """The seed of a clock that jumps, or an empty text."""
        jumps = self._clocks and self._clocks.random() < 1 / 3
        return str(self._clocks.random()) if self._clocks and jumps else ""

    async def start_ready(self, *kinds: Kind) -> None:
        """Start workers, and wait until they are ready."""
        started = [self.start(kind) for kind in kinds]
        await eventually(lambda: all(w.ready for w in started if w.status is None), timeout=60)

    def well(self, *kinds: Kind) -> list[Worker]:
        """The running workers of these kinds, or of all, that were not asked to stop."""
        return [w for w in self.all if w.well and (not kinds or w.kind in kinds)]

    async def stop(self) -> None:
        """Stop all in order: the sources of work first."""
        for kinds in (("gateway",), ("fetcher", "tools"), ("pipeline",), ("normalizer",), ("policy",), ("parser",)):
            await asyncio.gather(*(w.stop() for w in self.all if w.status is None and w.kind in kinds))
