"""`tokenbus` as a process, as a person or a script would run it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from tests import fork_server

TOKENBUS = (sys.executable, "-m", "tokenbus_services.cli")
ENDED_S = 120.0
"""Longest that a command may take which a test runs to its end."""


class Ended(NamedTuple):
    """What a command left."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        [line] = self.err.splitlines()
        assert line.startswith("error: ")
        return line


class Command:
    """A command that runs, and what it has written to stdout so far."""

    def __init__(self, process: Process, log: Path) -> None:
        self.process = process
        self.log = log
        self.seen: list[str] = []

    async def says(self, beginning: str, *, timeout: float = 120.0) -> str:
        """The next line of stdout that begins so.

        Raises AssertionError, with what was printed instead, if the command ends or ``timeout`` seconds pass first.
        """
        assert self.process.stdout
        try:
            async with asyncio.timeout(timeout):
                async for raw in self.process.stdout:
                    line = raw.decode().rstrip("\n")
                    self.seen.append(line)
                    if line.startswith(beginning):
                        return line
        except TimeoutError:
            pass
        raise AssertionError(f"it never printed {beginning!r}; it printed {self.seen}, and {self.log.read_text()}")

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send the signal and wait. The exit code."""
        if self.process.returncode is None:
            self.process.send_signal(number)
        try:
            async with asyncio.timeout(ENDED_S):
                return await self.process.wait()
        except TimeoutError:
            raise AssertionError(
                f"{number.name} did not end it in {ENDED_S:g} s; it printed {self.seen}, and {self.log.read_text()}"
            ) from None


def environment(**env: str) -> dict[str, str]:
    """This process's environment without any deployment's settings, and these."""
    return {**{k: v for k, v in os.environ.items() if not k.startswith("TOKENBUS_")}, **env}


async def run(*arguments: str, **env: str) -> Ended:
    return await fed(b"", *arguments, **env)


async def fed(stdin: bytes, *arguments: str, **env: str) -> Ended:
    """Run a command to its end with this on stdin. It is forked from a process that has imported everything."""
    with TemporaryDirectory() as directory:
        given, out, err = (Path(directory) / name for name in ("stdin", "out", "err"))
        given.write_bytes(stdin)
        process = fork_server.shared().start(*arguments, stdin=given, stdout=out, stderr=err, env=environment(**env))
        try:
            return Ended(await process.wait(timeout=ENDED_S), out.read_text(), err.read_text())
        finally:
            process.kill()


async def run_process(*arguments: str, **env: str) -> Ended:
    """Run a command to its end as a shell would: with an interpreter of its own."""
    process = await asyncio.create_subprocess_exec(
        *TOKENBUS, *arguments, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, env=environment(**env)
    )
    try:
        async with asyncio.timeout(ENDED_S):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()
        out, err = await process.communicate()
        raise AssertionError(f"{arguments} did not end within {ENDED_S:g} s; it printed {out} and {err}") from None
    assert process.returncode is not None
    return Ended(process.returncode, out.decode(), err.decode())


@asynccontextmanager
async def running(log: Path, *arguments: str, **env: str) -> AsyncGenerator[Command]:
    """A running command; killed at the end if it has not exited. Its stderr goes to ``log``."""
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *TOKENBUS, *arguments, stdout=PIPE, stderr=errors, env=environment(**env)
        )
    command = Command(process, log)
    try:
        yield command
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def descendants(directory: Path) -> dict[int, str]:
    """Processes that have this directory in their environment or work in it: id and command line.

    Such a one was started by the test; a Redis server writes its title over its environment. Finds none but on Linux.
    """
    mark = str(directory)
    if not sys.platform.startswith("linux"):
        return {}
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                here = (entry / "cwd").readlink().is_relative_to(directory)
                if here or mark.encode() in (entry / "environ").read_bytes():
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found[int(entry.name)] = line
            except OSError:
                continue  # it ended meanwhile, or is another user's
    return found


def settings_file(directory: Path, text: str = "", **given: int) -> str:
    """A settings file whose services take the given port, or any free one. Its path, for TOKENBUS_CONFIG."""
    path = directory / "tokenbus.toml"
    services = ("fetcher", "normalizer", "parser", "pipeline", "tools", "blobs", "recorder", "gateway")
    ports = "\n".join(f"{service} = {given.get(service, 0)}" for service in services)
    path.write_text(f"{text}\n[http]\n{ports}\n")
    return str(path)
