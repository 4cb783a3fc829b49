"""The worker processes of a round: made by a fork server, hurt by the chaos, stopped in order at the end."""

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
from tests.chaos.deployment.inside import END, FREEZE, TELL
from tests.chaos.record import Exit
from tests.e2e.fleet import CHAINED, SEPARATE, Kind
from tests.fork_server import Forked, ForkServer
from tests.waiting import eventually

FLEETS: tuple[tuple[Kind, ...], ...] = (SEPARATE, CHAINED, (*SEPARATE, *CHAINED))
"""What may stand between requests and public topics in a round."""
BESIDE: tuple[Kind, ...] = ("tools", "policy")
"""What each round has workers of besides."""
STOP_S = 30.0
"""Longest that an orderly stop may take; the server may be unavailable for a part of it."""


class Worker:
    """One process."""

    def __init__(self, kind: Kind, process: Forked, log: Path) -> None:
        self.kind: Kind = kind
        self.pid = process.pid
        self.log = log
        self._process = process
        self.frozen = False
        self.hurt_at: float | None = None
        """When one of its tasks was hurt, so that it has to go."""
        self.asked: int | None = None
        """The signal by which it was to end."""
        self.asked_at: float | None = None

    @property
    def status(self) -> int | None:
        """As `subprocess` has it: None while it runs, negative for a signal."""
        return self._process.returncode

    @property
    def ready(self) -> bool:
        """Whether it has said so."""
        return f"ready {self.kind} " in self.log.read_text(errors="replace")

    @property
    def well(self) -> bool:
        """Whether it runs and was not asked to stop."""
        return self.status is None and self.asked is None and not self.frozen and self.hurt_at is None

    def kill(self) -> None:
        """kill -9."""
        self._end(signal.SIGKILL)

    def freeze(self) -> None:
        """SIGSTOP."""
        self.frozen = True
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self.frozen = False
        self._signal(signal.SIGCONT)

    def hurt(self, how: Literal["ends", "freezes"]) -> None:
        """One of its long-lived tasks ends, or freezes."""
        self.hurt_at = time.monotonic()
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

    def tell(self) -> None:
        """Write into the log where each task waits."""
        self._signal(TELL)

    def exit(self) -> Exit:
        """How it ended."""
        assert self.status is not None
        return Exit(self.kind, self.pid, self.asked, self.status, self.ready, self.log.name, self._hurt_s)

    @property
    def _hurt_s(self) -> float | None:
        """How long it had to go by itself."""
        return None if self.hurt_at is None else (self.asked_at or time.monotonic()) - self.hurt_at

    def _end(self, number: signal.Signals) -> None:
        if self.asked is None:
            self.asked_at = time.monotonic()
            self.asked = number
        self._signal(number)

    def _signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)


class Workers:
    """All workers of a round. A context manager; what still runs at its end is killed."""

    def __init__(
        self,
        directory: Path,
        env: Mapping[str, str],
        build: str | None = None,
        *,
        kinds: tuple[Kind, ...],
        clocks: random.Random | None = None,
    ) -> None:
        """``kinds``: what the round has workers of. ``clocks``: chance by which a third of them have clocks that
        jump.
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
        self._server = ForkServer(inside.__name__)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server
        await asyncio.to_thread(self._server.close)

    def start(self, kind: Kind) -> Worker:
        """One more worker; it may not be ready yet."""
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
        """The seed of a clock that jumps, or nothing."""
        jumps = self._clocks and self._clocks.random() < 1 / 3
        return str(self._clocks.random()) if self._clocks and jumps else ""

    async def start_ready(self, *kinds: Kind) -> None:
        """Workers that are ready."""
        started = [self.start(kind) for kind in kinds]
        await eventually(lambda: all(w.ready for w in started if w.status is None), timeout=60)

    def well(self, *kinds: Kind) -> list[Worker]:
        """The running workers of these kinds, or of all, that were not asked to stop."""
        return [w for w in self.all if w.well and (not kinds or w.kind in kinds)]

    async def stop(self) -> None:
        """Stop all in order: what brings work in goes first."""
        for kinds in (("gateway",), ("fetcher", "tools"), ("pipeline",), ("normalizer",), ("policy",), ("parser",)):
            await asyncio.gather(*(w.stop() for w in self.all if w.status is None and w.kind in kinds))
