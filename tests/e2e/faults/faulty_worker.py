"""`tokenbus worker KIND` whose long-lived tasks a test can list, end and freeze, and whose items it can hold.

On SIGUSR1 it reads its file: ``list`` writes the names of its tasks that may not end beside it; ``end NAME`` and
``freeze NAME`` do that to each task of this name at its next wake-up, in any await; ``block`` never gives the event
loop back, nor do ``burn`` and ``hold``, which keep the interpreter's lock, with and without using the CPU; ``let go``
and ``cancel`` are of the items. It changes its own copy of the product, as the broken builds of the chaos do.

The work on an item with a name of `held_name` is held at its k-th await, until it is cancelled there; it never gets on.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import time
import types
from collections.abc import Coroutine, Generator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog

from tests import fork_server
from tests.e2e.fleet import Kind
from tests.waiting import eventually
from tokenbus.bus.liveness import Liveness
from tokenbus_services.blobs.http import WithBlobs
from tokenbus_services.cli import worker
from tokenbus_services.gateway.app import WithPages
from tokenbus_services.policy_stage.run_task import PolicyRunTask
from tokenbus_services.runtime import supervision
from tokenbus_services.runtime.app.faststream_source import SourceSubscriber
from tokenbus_services.runtime.queue_work import InFlight

SIGNAL = signal.SIGUSR1
STARTED_S = 60.0
BLOCKED_S = "FAULTY_BLOCKED_S"
"""Variable with the time after which the worker's event loop counts as blocked."""


class Fault(BaseException):
    """No handler of exceptions expects it."""


HELD = re.compile(rb"held-(item|policy|http)-(\d+)-")
"""The name of an item that is to be held: where, and at which of its awaits."""


def held_name(site: str, step: int, text: str) -> str:
    """The name of a run, or the id of a request, that is to be held."""
    return f"held-{site}-{step}-{text}"


class HeldItems:
    """Holds each named item at its await."""

    def __init__(self, report: Path) -> None:
        self._report = report
        self._held: set[asyncio.Task[Any]] = set()
        self._hold = True

    def install(self) -> None:
        """Drive the items of all workers: of queues, of the policy stage, and the requests of HTTP services."""
        queues: Any = InFlight
        policies: Any = PolicyRunTask
        begin, judge = queues._begin, policies._work

        async def item(worker: Any, work: Any) -> None:
            await self._driven("item", b" ".join(work.item.fields), begin(worker, work))

        async def judged(task: Any) -> None:
            await self._driven("policy", task.run.encode(), judge(task))

        queues._begin, policies._work = item, judged
        for app in (WithPages, WithBlobs):
            app.__call__ = self._answered(app.__call__)

    def _answered(self, answer: Any) -> Any:
        async def answered(app: Any, scope: Any, receive: Any, send: Any) -> None:
            name = dict(scope.get("headers", ())).get(b"x-request-id", b"")
            await self._driven("http", name, answer(app, scope, receive, send))

        return answered

    def let_go(self, *, cancel: bool) -> None:
        """Hold no more items; those that are held stay where they are until they are cancelled, which may be now."""
        self._hold = False
        self._report.with_suffix(".let_go").touch()
        for task in self._held if cancel else ():
            task.cancel()

    async def _driven(self, site: str, name: bytes, work: Coroutine[Any, Any, Any]) -> Any:
        found = HELD.search(name)
        if not found or found[1].decode() != site:
            return await work
        return await self._held_at(name.decode(), int(found[2]), work)

    @types.coroutine
    def _held_at(self, name: str, step: int, work: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        task = asyncio.current_task()
        assert task
        sent, raised, steps = None, None, 0
        while True:
            try:
                waits_for = work.throw(raised) if raised else work.send(sent)
            except StopIteration as e:
                self._say("over", name, steps)
                return e.value
            except BaseException:
                self._say("over", name, steps)
                raise
            sent, raised, steps = None, None, steps + 1
            try:
                if self._hold and steps >= step:
                    self._held.add(task)
                    self._say("held", name, steps)
                    try:
                        yield from asyncio.get_running_loop().create_future()
                    except asyncio.CancelledError:
                        self._held.discard(task)
                        if not waits_for or not waits_for.cancel():  # as the task itself would do
                            raise
                sent = yield waits_for
            except BaseException as e:
                raised = e

    def _say(self, what: str, name: str, steps: int) -> None:
        with self._report.open("a") as report:
            report.write(f"{what} {name} {steps}\n")


class Faults:
    """What is to happen to which task."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.items = HeldItems(file.with_suffix(".items"))
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
        """Drive every long-lived task of this process, and the items that are to be held."""
        self.items.install()
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
                tasks = [each for liveness in self.known for each in liveness.tasks]
                names = {each.name for each in tasks if not each.may_end}
                unfinished = self._file.with_suffix(".unfinished")
                unfinished.write_text("\n".join(sorted(names)))
                unfinished.rename(self._file.with_suffix(".names"))
            case "let" | "cancel":
                self.items.let_go(cancel=what == "cancel")
            case "block":
                while True:
                    time.sleep(1)
            case "burn":
                re.match(r"(a|a)*b", "a" * 60)
            case "hold":
                ctypes.PyDLL(None).sleep(3600)
            case _:
                self.of[name] = what


def prepare(file: str) -> None:
    """In the worker, before it starts: let this file rule it."""
    if bound := os.environ.get(BLOCKED_S):
        supervision.BLOCKED_S = float(bound)  # pyright: ignore[reportConstantRedefinition]
    Faults(Path(file)).install()


class FaultyWorker:
    """One such worker, as the test that starts it sees it."""

    def __init__(self, kind: Kind, directory: Path, name: str, env: Mapping[str, str] | None = None) -> None:
        self.kind: Kind = kind
        self._file = directory / f"{name}.fault"
        self._log = directory / f"{name}.log"
        self._process = fork_server.shared().start(
            *("worker", kind, "--port", "0"),
            env={**os.environ, "TOKENBUS_CONFIG": str(directory / "tokenbus.toml"), **(env or {})},
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
        try:
            await eventually(lambda: "ready " in self.log or self._process.returncode is not None, timeout=STARTED_S)
        except AssertionError as e:
            raise AssertionError(f"{self.kind}: {e}\n{self.log[-4000:]}") from None
        assert self._process.returncode is None, (self._process.returncode, self.log)

    @property
    def url(self) -> str:
        """Of its HTTP pages, once it is ready."""
        return self.log.partition(f"ready {self.kind} ")[2].split()[0]

    @property
    def items(self) -> dict[str, str]:
        """What became last of each item that was to be held: `held` or `over`."""
        report = self._file.with_suffix(".items")
        lines = report.read_text().split("\n")[:-1] if report.exists() else []
        return {name: what for what, name, _ in (line.split() for line in lines)}

    @property
    def let_go(self) -> bool:
        """Whether it holds no more items."""
        return self._file.with_suffix(".let_go").exists()

    def terminate(self) -> None:
        self._process.terminate()

    def inject(self, fault: str) -> None:
        """Let this happen to it."""
        self._file.write_text(fault)
        self._process.send_signal(SIGNAL)

    async def names(self) -> set[str]:
        """Of its long-lived tasks that may not end."""
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
        self._process.kill()
        await self._process.wait()
