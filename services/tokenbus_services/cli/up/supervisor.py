"""Runs services as child processes: starts them concurrently, restarts dead ones, stops all in order."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, Self

import msgspec

from tokenbus.errors import ServerUnavailable, TokenbusError
from tokenbus_services.cli import exit_codes as ending
from tokenbus_services.cli.service_registry import CALLS_PROVIDERS, STOP_ORDER, ServiceName
from tokenbus_services.process import parent_guard as guard
from tokenbus_services.process.embedded_server import EmbeddedServer


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

    def stopping(self) -> None: ...


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
        self._sources_gone = asyncio.Event()
        """No fetcher is left: what a gateway still answers gets no more events."""

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
                for together in (*STOP_ORDER, (None,)):
                    names = [slot.name for slot in self._slots if slot.service in together]
                    for name in names:
                        stops[name].set()
                    sources = [keeping[slot.name] for slot in self._slots if slot.service in CALLS_PROVIDERS]
                    if sources and "gateway" in together:
                        await asyncio.gather(*sources, return_exceptions=True)
                        self._sources_gone.set()
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
                hurry = self._sources_gone if slot.service == "gateway" else asyncio.Event()
                await child.stop(self._grace_s, hurry)
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


# Decides when to restart a child that died. Uses no clock.

FIRST_PAUSE_S: Final = 0.25
LONGEST_PAUSE_S: Final = 15.0
HEALTHY_S: Final = 60.0
_LEAST_SIGNAL = 128


class RestartBackoff:
    """The restart delays of one child: doubled each time up to a limit, reset after a healthy minute."""

    def __init__(self) -> None:
        self._next_s = FIRST_PAUSE_S

    def pause_s(self, *, ready_for_s: float | None) -> float:
        """Return how long to wait before the next start. ``ready_for_s``: how long the child was ready; None: never."""
        if ready_for_s is not None and ready_for_s >= HEALTHY_S:
            self._next_s = FIRST_PAUSE_S
        pause_s = self._next_s
        self._next_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return pause_s


def will_not_recover(code: int, *, was_ready: bool) -> bool:
    """Whether a restart cannot help: the child was never ready and reported a configuration error."""
    return code == ending.USAGE and not was_ready


def how_it_ended(code: int) -> str:
    """Describe the exit code; above 128 it means a signal, as in a shell."""
    if code > _LEAST_SIGNAL:
        try:
            return f"was ended by {signal.Signals(code - _LEAST_SIGNAL).name}"
        except ValueError:
            pass
    return f"ended with exit code {code}"


NAME = "server"
_LOOK_S = 0.25


class UpServer:
    """``async with UpServer(directory, watcher) as server: … server.url``. Its data survive a restart."""

    def __init__(self, directory: Path, watcher: Watcher) -> None:
        """Raises ServerUnavailable if there is no server binary."""
        self._embedded = EmbeddedServer(directory, appendonly=True)
        self._watcher = watcher
        self._stop = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return self._embedded.url

    async def __aenter__(self) -> Self:
        """Start the server. Raises ServerUnavailable."""
        await asyncio.to_thread(self._embedded.start)
        self._keeping = asyncio.create_task(self._keep(), name="own server")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._keeping
        self._stop.set()
        await self._keeping  # not cancelled: a start running in its thread would overlap with the stop
        await asyncio.to_thread(self._embedded.stop)

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        restarts = RestartBackoff()
        started = loop.time()
        while not await self._stopped_within(_LOOK_S):
            if self._embedded.running:
                continue
            pause_s = restarts.pause_s(ready_for_s=loop.time() - started)
            self._watcher.died(NAME, "ended", pause_s)
            if await self._stopped_within(pause_s):
                return
            try:
                await asyncio.to_thread(self._embedded.start)
                started = loop.time()
                self._watcher.ready(NAME, self.url)
            except ServerUnavailable as e:
                self._watcher.on_line(NAME, str(e))

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                return await self._stop.wait()
        except TimeoutError:
            return False


# A child process that cannot outlive this one: a guard ends it (see `tokenbus_services.process.parent_guard`).

_LONGEST_LINE = 2**20
_LAST_WORDS_S = 1.0
_LAST_EVENTS_S = 1.0
"""What the last fetcher wrote is with the clients of a gateway by then."""


class ChildGone(TokenbusError):
    """A child ended unexpectedly and is not restarted."""

    code = "child_gone"

    def __init__(self, name: str, exit_code: int, last_line: str = "") -> None:
        message = last_line.removeprefix("error: ")
        super().__init__(f"{name} {how_it_ended(exit_code)}" + (f": {message}" if message else ""))
        self.name = name
        self.exit_code = exit_code or ending.OTHER


class ChildrenSlow(TokenbusError):
    """Children were not ready in time."""

    code = "children_slow"

    def __init__(self, names: Sequence[str], timeout_s: float) -> None:
        super().__init__(f"not ready after {timeout_s:g} s: {', '.join(names)}")
        self.names = names


class Child:
    """A program with its guard, from `start` to its end. Each line of its output is passed to ``on_line``."""

    def __init__(self, guarding: Process, pid: int, on_line: Callable[[str], None]) -> None:
        self.pid = pid
        """The program's process id; 0 if it could not be started."""
        self._guarding = guarding
        self._unread_output: Exception | None = None
        self._life = asyncio.create_task(self._live(on_line), name=f"life of {pid}")

    @classmethod
    async def start(cls, command: Sequence[str], env: Mapping[str, str], on_line: Callable[[str], None]) -> Self:
        """Start the program. Raises OSError if no process can be created."""
        guarding = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", guard.__file__, *command),
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env=env,
            limit=_LONGEST_LINE,
            start_new_session=True,  # Ctrl-C goes to this process only, which stops all children in order
        )
        assert guarding.stdout
        return cls(guarding, int(await guarding.stdout.readline() or 0), on_line)

    async def ended(self) -> int:
        """Wait for the program to end; return its exit code as a shell reports it. Raises what ``on_line`` raised."""
        return await asyncio.shield(self._life)

    async def stop(self, grace_s: float, hurry: asyncio.Event | None = None) -> int:
        """Send SIGTERM, then SIGKILL after ``grace_s``, and wait. Returns the exit code.

        ``hurry``: SIGTERM is sent again soon after it is set.
        """
        self._send(signal.SIGTERM)
        hurrying = asyncio.create_task(self._hurry(hurry)) if hurry else None
        try:
            async with asyncio.timeout(grace_s):
                return await self.ended()
        except TimeoutError:
            self._send(signal.SIGKILL)
            return await self.ended()
        finally:
            if hurrying:
                hurrying.cancel()

    async def _hurry(self, when: asyncio.Event) -> None:
        await when.wait()
        await asyncio.sleep(_LAST_EVENTS_S)
        self._send(signal.SIGTERM)

    def _send(self, number: signal.Signals) -> None:
        if self.pid and self._guarding.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def _live(self, on_line: Callable[[str], None]) -> int:
        listening = asyncio.create_task(self._listen(on_line))
        code = await self._guarding.wait()
        await asyncio.wait(
            {listening}, timeout=_LAST_WORDS_S
        )  # a process that the program left behind may hold the pipe
        listening.cancel()
        if self._unread_output:
            raise self._unread_output
        return code if code >= 0 else 128 - code

    async def _listen(self, on_line: Callable[[str], None]) -> None:
        output = self._guarding.stderr
        assert output
        while True:
            try:
                line = await output.readline()
            except ValueError:
                continue  # longer than any log line; the reader has dropped it
            if not line:
                return
            if self._unread_output is None:
                try:
                    on_line(line.decode(errors="replace").rstrip())
                except Exception as e:  # for example, our own stdout was closed, so output has no reader
                    self._unread_output = e
                    self._send(signal.SIGTERM)
