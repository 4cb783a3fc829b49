"""The tool of the chaos runs. Each execution is a line of a file that no fault affects."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from uuid import uuid4

import msgspec

from tests.chaos.record import Line
from tokenbus.tools import ToolContext

PATH = "TOKENBUS_CHAOS_LEDGER"
"""The environment variable with the path of the file."""


async def look(what: str, wait_ms: int, context: ToolContext) -> dict[str, str]:
    """The tool: waits, writes its line, returns the line's nonce."""
    await asyncio.sleep(wait_ms / 1000)
    line = Line(context.run, context.key, what, uuid4().hex)
    file = os.open(os.environ[PATH], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, msgspec.json.encode(line) + b"\n")
    finally:
        os.close(file)
    return {"what": what, "nonce": line.nonce}


def read(path: Path) -> list[Line]:
    """All executions. A line that its worker did not finish does not count."""
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    return [msgspec.json.decode(line, type=Line) for line in lines[:-1]]
