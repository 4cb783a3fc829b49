"""`tokenbus worker KIND` whose long-lived tasks a test can list, end and freeze.

On SIGUSR1 it reads its file: ``list`` writes the names of its tasks beside it; ``end NAME`` and ``freeze NAME`` do that
to each task of this name at its next wake-up, in any await; ``block`` never gives the event loop back. It changes
its own copy of the product, as the broken builds of the chaos do.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
import types
from collections.abc import Coroutine, Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog

from tests import fork_server
from tests.e2e.fleet import Kind
from tests.waiting import eventually
from tokenbus.bus.liveness import Liveness
from tokenbus_services.cli.worker import command as worker
from tokenbus_services.runtime import supervision
from tokenbus_services.runtime.app.faststream_source import SourceSubscriber

SIGNAL = signal.SIGUSR1
STARTED_S = 120.0


class Fault(BaseException):
    """No handler of exceptions expects it."""


class Faults:
    """What is to happen to which task."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.of: dict[str, str] = {}
        self.known: list[Liveness] = []

    @types.coroutine
    def _driven(self, name: str, work: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """The coroutine, step by step, until its fault comes."""
        sent, raised = None, None
        while True:
            try:
                waits_for = work.throw(raised) if raised else work.send(sent)
            except StopIteration as e:
                return e.value
            sent, raised = None, None
            try:
                sent = yield waits_for
            except BaseException as e:
                raised = e
            match self.of.get(name):
                case "freeze":
                    structlog.get_logger().info("frozen", task=name)
                    while not any(liveness.failed for liveness in self.known):
                        with suppress(asyncio.CancelledError):  # no timeout ends it either
                            yield from asyncio.get_running_loop().create_future()
                case "end":
                    raised = Fault(name)
                case _:
                    pass

    async def driven(self, name: str, work: Coroutine[Any, Any, Any]) -> Any:
        """The coroutine, until its fault comes."""
        return await self._driven(name, work)

    def install(self) -> None:
        """Drive every long-lived task of this process."""
        start, passing = Liveness.start, Liveness.start_passing
        consume: Any = SourceSubscriber._consume  # pyright: ignore[reportPrivateUsage]
        faults = self

        def started(self: Liveness, work: Any, *, name: str) -> Any:
            faults.known.append(self)
            return start(self, faults.driven(name, work), name=name)

        def passed(self: Liveness, work: Any, *, name: str) -> Any:
            return passing(self, faults.driven(name, work), name=name)

        async def consumed(self: Any, *args: Any, **more: Any) -> None:
            await faults.driven(self._task_name, consume(self, *args, **more))

        Liveness.start = started
        Liveness.start_passing = passed
        SourceSubscriber._consume = consumed  # pyright: ignore[reportPrivateUsage]
        serve: Any = worker.serve

        async def served(*args: Any, **how: Any) -> None:
            asyncio.get_running_loop().add_signal_handler(SIGNAL, self.on_signal)
            await serve(*args, **how)

        worker.serve = served

    def on_signal(self) -> None:
        """Do what the file says."""
        what, _, name = self._file.read_text().partition(" ")
        match what:
            case "list":
                names = {name for liveness in self.known for name in liveness.names}
                unfinished = self._file.with_suffix(".unfinished")
                unfinished.write_text("\n".join(sorted(names)))
                unfinished.rename(self._file.with_suffix(".names"))
            case "block":
                supervision.BLOCKED_S = 3.0  # pyright: ignore[reportConstantRedefinition]
                while True:
                    time.sleep(1)
            case _:
                self.of[name] = what


def prepare(file: str) -> None:
    """In the worker, before it starts: let this file rule it."""
    Faults(Path(file)).install()


class FaultyWorker:
    """One such worker, as the test that starts it sees it."""

    def __init__(self, kind: Kind, directory: Path, name: str) -> None:
        self.kind: Kind = kind
        self._file = directory / f"{name}.fault"
        self._log = directory / f"{name}.log"
        self._process = fork_server.shared().start(
            *("worker", kind, "--port", "0"),
            env={**os.environ, "TOKENBUS_CONFIG": str(directory / "tokenbus.toml")},
            stdout=self._log,
            stderr=self._log,
            prepare=(f"{__name__}:prepare", str(self._file)),
        )

    @property
    def log(self) -> str:
        """What it has written so far."""
        return self._log.read_text() if self._log.exists() else ""

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ready(self) -> None:
        """Wait until it says so."""
        await eventually(lambda: "ready " in self.log or self._process.returncode is not None, timeout=STARTED_S)
        assert self._process.returncode is None, (self._process.returncode, self.log)

    def inject(self, fault: str) -> None:
        """Let this happen to it."""
        self._file.write_text(fault)
        self._process.send_signal(SIGNAL)

    async def names(self) -> set[str]:
        """Of its long-lived tasks."""
        listed = self._file.with_suffix(".names")
        listed.unlink(missing_ok=True)
        self.inject("list")

        def written() -> set[str]:
            return set(listed.read_text().split("\n")) if listed.exists() else set()

        return await eventually(written)

    async def ended(self, *, timeout: float) -> int:
        """Wait until it has, by itself. Its exit code."""
        return await self._process.wait(timeout=timeout)

    async def kill(self) -> None:
        """kill -9, if it lives."""
        self._process.kill()
        await self._process.wait()
