"""An executor over MCP servers that are real processes."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.services.tools.conftest import MemoryBlobs, call
from tests.waiting import eventually
from tokenbus_services.settings import LimitSettings, McpSettings, McpStdio
from tokenbus_services.tools.executor import ToolExecutor, ToolOutcome, ToolRegistry

SAMPLE = Path(__file__).with_name("sample_server.py")


class Notes:
    """What a sample server wrote down."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def lines(self) -> list[str]:
        return self.path.read_text().splitlines() if self.path.exists() else []

    @property
    def pids(self) -> list[int]:
        """Of all processes that the server was, in their order."""
        return [int(line.removeprefix("pid ")) for line in self.lines if line.startswith("pid ")]

    async def has(self, line: str) -> None:
        """Returns once it wrote this."""
        await eventually(lambda: line in self.lines)


@pytest.fixture
def notes(tmp_path: Path) -> Notes:
    return Notes(tmp_path / "notes")


def stdio(*, script: str | None = None, **settings: Any) -> McpStdio:
    """The sample server as a child, or Python code in its place."""
    args = ("-c", script) if script is not None else (str(SAMPLE),)
    return McpStdio(command=sys.executable, args=args, **settings)


Start = Callable[..., Any]


@pytest.fixture
async def start(blobs: MemoryBlobs, notes: Notes) -> AsyncIterator[Start]:
    """Opens an executor over servers, given by name; closes it after the test, and looks for processes left."""
    opened: list[ToolExecutor] = []

    async def make(*, limit: int = 1000, message_bytes: int = 2**20, **servers: McpSettings) -> ToolExecutor:
        env = {**os.environ, "NOTES": str(notes.path), "SECRET": "very-secret"}
        passed = {
            name: replace(server, env_pass=(*server.env_pass, "NOTES")) if isinstance(server, McpStdio) else server
            for name, server in servers.items()
        }
        registry = ToolRegistry({}, passed, env=env, message_bytes=message_bytes)
        executor = ToolExecutor(registry, LimitSettings(tool_result_bytes=limit), blobs)
        opened.append(executor)
        await executor.open()
        await eventually(lambda: executor.mcp is None or executor.mcp.ready)
        return executor

    yield make
    for executor in opened:
        await executor.close()
    assert not [pid for pid in notes.pids if alive(pid)], "a server outlived its executor"


def alive(pid: int) -> bool:
    """Whether this process runs; one that ended and was not waited for does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        if Path("/proc/self").exists():
            return False
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True
    return stat.rpartition(")")[2].split()[0] != "Z"


async def answer(executor: ToolExecutor, name: str, arguments: str = "{}", **changes: Any) -> ToolOutcome:
    return await asyncio.wait_for(executor.execute(call(name, arguments, **changes)), 60)
