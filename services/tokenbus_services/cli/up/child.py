"""A child process that cannot outlive this one: a guard ends it (see `tokenbus_services.process.parent_guard`)."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Self

from tokenbus.errors import TokenbusError
from tokenbus_services.cli import exit_codes as ending
from tokenbus_services.cli.up.restart_backoff import how_it_ended
from tokenbus_services.process import parent_guard as guard

_LONGEST_LINE = 2**20
_LAST_WORDS_S = 1.0


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

    async def stop(self, grace_s: float) -> int:
        """Send SIGTERM, then SIGKILL after ``grace_s``, and wait. Returns the exit code."""
        self._send(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                return await self.ended()
        except TimeoutError:
            self._send(signal.SIGKILL)
            return await self.ended()

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
