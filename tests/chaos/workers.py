"""The worker processes of a round: made by the zygote, hurt by the chaos, stopped in order at the end."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import msgspec

from tests.chaos.record import Exit
from tests.chaos.zygote import CLOCK, END, FREEZE, TELL, Born, Order, Told
from tests.e2e.fleet import WITH_TOOLS, Kind
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
ALL: tuple[Kind, ...] = (*WITH_TOOLS, "policy")
"""What a round has workers of."""
STOP_S = 30.0
"""Longest that an orderly stop may take; the server may be away for a part of it."""


class Worker:
    """One process."""

    def __init__(self, kind: Kind, pid: int, log: Path) -> None:
        self.kind: Kind = kind
        self.pid = pid
        self.log = log
        self.frozen = False
        self.hurt_at: float | None = None
        """When one of its tasks was hurt, so that it has to go."""
        self.asked: int | None = None
        """The signal by which it was to end."""
        self.asked_at: float | None = None
        self.status: int | None = None
        self.ended = asyncio.Event()

    @property
    def ready(self) -> bool:
        """Whether it has said so."""
        return f"ready {self.kind} " in self.log.read_text(errors="replace")

    @property
    def well(self) -> bool:
        """Whether it runs, and nobody wanted anything else."""
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
        """SIGTERM, and wait; kill -9 where that takes too long, which its `Exit` then tells."""
        self.thaw()
        self._end(signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await self.ended.wait()
        if self.status is None:
            self._signal(signal.SIGKILL)
        await self.ended.wait()

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
        if self.status is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Workers:
    """All workers of a round. A context manager; what still runs at its end is killed."""

    def __init__(
        self, directory: Path, env: Mapping[str, str], build: str | None = None, *, clocks: random.Random | None = None
    ) -> None:
        """``clocks``: chance by which a third of the workers have clocks that jump."""
        self._clocks = clocks
        self._directory = directory
        self._env = dict(env)
        self._build = [build] if build else []
        self._zygote: asyncio.subprocess.Process | None = None
        self._births: deque[tuple[Kind, Path, asyncio.Future[Worker]]] = deque()
        self._listening: asyncio.Task[None] | None = None
        self.all: list[Worker] = []

    async def __aenter__(self) -> Self:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._zygote = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.chaos.zygote", *self._build),
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C is for the harness
        )
        self._listening = asyncio.create_task(self._listen())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._zygote
        assert self._zygote.stdin
        assert self._listening
        self._zygote.stdin.close()
        await self._zygote.wait()
        await self._listening

    async def start(self, kind: Kind) -> Worker:
        """One more worker; it may not be ready yet."""
        assert self._zygote
        assert self._zygote.stdin
        log = self._directory / f"{len(self.all) + len(self._births)}-{kind}.log"
        born: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()
        self._births.append((kind, log, born))
        self._zygote.stdin.write(msgspec.json.encode(Order(kind, str(log), self._env | self._clock())) + b"\n")
        return await born

    def _clock(self) -> dict[str, str]:
        jumps = self._clocks and self._clocks.random() < 1 / 3
        return {CLOCK: str(self._clocks.random())} if self._clocks and jumps else {}

    async def start_ready(self, *kinds: Kind) -> None:
        """Workers that are ready."""
        started = [await self.start(kind) for kind in kinds]
        await eventually(lambda: all(w.ready for w in started if w.status is None), timeout=60)

    def well(self, *kinds: Kind) -> list[Worker]:
        """Those of these kinds, or of all, that run and shall go on."""
        return [w for w in self.all if w.well and (not kinds or w.kind in kinds)]

    async def stop(self) -> None:
        """Stop all in order: what brings work in goes first."""
        for kinds in (("fetcher", "tools"), ("normalizer",), ("policy",), ("parser",)):
            await asyncio.gather(*(w.stop() for w in self.all if w.status is None and w.kind in kinds))

    async def _listen(self) -> None:
        assert self._zygote
        assert self._zygote.stdout
        by_pid: dict[int, Worker] = {}
        async for line in self._zygote.stdout:
            match msgspec.json.decode(line, type=Told):
                case Born(pid):
                    kind, log, born = self._births.popleft()
                    log.touch()
                    worker = by_pid[pid] = Worker(kind, pid, log)
                    self.all.append(worker)
                    born.set_result(worker)
                case died:
                    worker = by_pid.pop(died.pid)
                    worker.status = died.status
                    worker.ended.set()
