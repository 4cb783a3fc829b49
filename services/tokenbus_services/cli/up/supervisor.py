"""Runs services as child processes: starts them concurrently, restarts dead ones, stops all in order."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from tokenbus_services.cli.service_registry import STOP_ORDER, ServiceName
from tokenbus_services.cli.up.child import Child, ChildGone, ChildrenSlow
from tokenbus_services.cli.up.restart_backoff import RestartBackoff, how_it_ended, will_not_recover


class WorkerSlot(msgspec.Struct, frozen=True, kw_only=True):
    """A worker to run, or the mock provider."""

    name: str
    service: ServiceName | None
    """None: not a service, so it stops last; its ``program`` prints `ready NAME URL`."""
    arguments: tuple[str, ...] = ()
    """Arguments of `tokenbus worker SERVICE`."""
    program: tuple[str, ...] = ()
    withheld: frozenset[str] = frozenset()
    """Environment variables that it does not get."""

    @property
    def command(self) -> list[str]:
        if self.service is None:
            return list(self.program)
        # -P: a file in the current directory must not be imported in place of one of our modules.
        return [sys.executable, "-P", "-m", "tokenbus_services.cli", "worker", self.service, *self.arguments]


class Watcher(Protocol):
    """Receives the events of children."""

    def on_line(self, name: str, line: str) -> None:
        """A child wrote a line of output."""
        ...

    def ready(self, name: str, url: str) -> None:
        """A child reported that it is ready."""
        ...

    def all_ready(self) -> None:
        """Every child has been ready once."""
        ...

    def died(self, name: str, how: str, pause_s: float) -> None:
        """A child ended unexpectedly; it is restarted after ``pause_s``."""
        ...

    def stopping(self) -> None:
        """All children are being stopped."""
        ...


class Supervisor:
    """Keeps the workers of one machine running until it is stopped."""

    def __init__(
        self,
        slots: Sequence[WorkerSlot],
        *,
        env: Mapping[str, str],
        watcher: Watcher,
        grace_s: float,
        restart: bool = True,
    ) -> None:
        """``grace_s``: how long a worker may take to stop. ``restart``: if False, a child that ends stops
        everything.
        """
        self._slots = slots
        self._env = env
        self._watcher = watcher
        self._grace_s = grace_s
        self._restart = restart
        self._waiting_for = {slot.name for slot in slots}
        self._all_ready = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        """Keep all running until ``stop`` is set, then stop all. Raises ChildGone after it has stopped the others."""
        stops = {slot.name: asyncio.Event() for slot in self._slots}
        keeping = {slot.name: asyncio.create_task(self._keep(slot, stops[slot.name])) for slot in self._slots}
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({stopped, *keeping.values()}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            try:
                self._watcher.stopping()
            finally:
                for service in (*STOP_ORDER, None):
                    names = [slot.name for slot in self._slots if slot.service == service]
                    for name in names:
                        stops[name].set()
                    await asyncio.gather(*(keeping[name] for name in names), return_exceptions=True)
        for task in keeping.values():
            task.result()

    async def all_ready(self, *, timeout_s: float) -> None:
        """Wait until every worker has been ready once. Raises ChildrenSlow, naming those that were not."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._all_ready.wait()
        except TimeoutError:
            raise ChildrenSlow(sorted(self._waiting_for), timeout_s) from None

    async def _keep(self, slot: WorkerSlot, stop: asyncio.Event) -> None:
        restarts = RestartBackoff()
        stopped = asyncio.create_task(stop.wait())
        while not stop.is_set():
            life = _ChildLife()
            env = {name: value for name, value in self._env.items() if name not in slot.withheld}
            child = await Child.start(slot.command, env, lambda line, life=life: self._on_line(slot, life, line))
            ended = asyncio.create_task(child.ended())
            await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set():
                await child.stop(self._grace_s)
                return
            code = ended.result()
            if not self._restart or will_not_recover(code, was_ready=slot.name not in self._waiting_for):
                raise ChildGone(slot.name, code, life.last_line)
            pause_s = restarts.pause_s(ready_for_s=life.ready_for_s)
            self._watcher.died(slot.name, how_it_ended(code), pause_s)
            await asyncio.wait({stopped}, timeout=pause_s)

    def _on_line(self, slot: WorkerSlot, life: _ChildLife, line: str) -> None:
        if not line.startswith(f"ready {slot.service or slot.name} "):
            life.last_line = line or life.last_line
            self._watcher.on_line(slot.name, line)
            return
        life.ready_at = time.monotonic()
        self._watcher.ready(slot.name, line.split()[2])
        self._waiting_for.discard(slot.name)
        if not self._waiting_for and not self._all_ready.is_set():
            self._watcher.all_ready()
            self._all_ready.set()


class _ChildLife:
    """One lifetime of a worker's child process."""

    def __init__(self) -> None:
        self.ready_at: float | None = None
        self.last_line = ""

    @property
    def ready_for_s(self) -> float | None:
        return None if self.ready_at is None else time.monotonic() - self.ready_at
