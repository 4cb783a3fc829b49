"""A command on a real terminal: keys go in, and the screen is what a person would see, scrolled rows included."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import struct
import termios
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

import pyte

from tests.services.cli.process import ENDED_S, TOKENBUS, environment
from tests.waiting import eventually

COLUMNS, ROWS = 80, 24
CTRL_C, CTRL_D, UP, TAB = "\x03", "\x04", "\x1b[A", "\t"


class Terminal:
    """A terminal and the command that runs on it."""

    def __init__(self, process: Process, end: int) -> None:
        self.process = process
        self._end = end
        self._screen = pyte.HistoryScreen(COLUMNS, ROWS, history=10_000)
        self._screen.write_process_input = self.type  # its answers, as to where the cursor is
        self._stream = pyte.ByteStream(self._screen)

    def read(self) -> None:
        """Take what the command has written."""
        with suppress(OSError):  # it has ended
            self._stream.feed(os.read(self._end, 65_536))

    def type(self, data: str) -> None:
        """Press keys."""
        os.write(self._end, data.encode())

    @property
    def rows(self) -> list[str]:
        """The rows that are not empty, from the first that was ever shown."""
        scrolled = ["".join(cell.data for _, cell in sorted(row.items())) for row in self._screen.history.top]
        return [row.rstrip() for row in (*scrolled, *self._screen.display) if row.strip()]

    @property
    def text(self) -> str:
        """All rows."""
        return "\n".join(self.rows)

    async def shows(self, *parts: str) -> str:
        """Wait until the screen has these parts, in this order; return its text."""

        def shown() -> str:
            text, at = self.text, 0
            for part in parts:
                at = text.find(part, at)
                assert at >= 0, f"no {part!r} in\n{text}"
                at += len(part)
            return text

        return await eventually(shown, timeout=ENDED_S)


@asynccontextmanager
async def terminal(*arguments: str, **env: str) -> AsyncGenerator[Terminal]:
    """Run `tokenbus` on a terminal; killed at the end if it has not exited."""
    ours, its = pty.openpty()
    os.set_blocking(ours, False)
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    env = {"TERM": "xterm-256color", "LC_ALL": "C.UTF-8", **env}
    process = await asyncio.create_subprocess_exec(
        *TOKENBUS, *arguments, stdin=its, stdout=its, stderr=its, env=environment(**env)
    )
    os.close(its)
    opened = Terminal(process, ours)
    loop = asyncio.get_running_loop()
    loop.add_reader(ours, opened.read)
    try:
        yield opened
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        loop.remove_reader(ours)
        os.close(ours)
