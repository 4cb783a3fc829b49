"""The tool of the chaos runs. Each execution is a line of a file that no fault affects."""

from __future__ import annotations

import asyncio
import os
import re
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import msgspec

from tests.chaos.record import Line
from tokenbus.tools import ToolContext

PATH = "TOKENBUS_CHAOS_LEDGER"
"""The environment variable with the path of the file."""
TIMEOUT_S = 20.0
"""Of each call."""


async def look(what: str, wait_ms: int, context: ToolContext) -> dict[str, str]:
    """The tool: waits, writes its line, returns the line's nonce. Or takes a token, and never gives its interpreter's
    lock back.
    """
    await asyncio.sleep(wait_ms / 1000)
    line = Line(context.run, context.key, what, uuid4().hex)
    path = Path(os.environ[PATH])
    if _takes_token(tokens_of(path)):
        _append(holders_of(path), line)
        re.match(r"(a|a)*b", "a" * 60)
    _append(path, line)
    return {"what": what, "nonce": line.nonce}


def tokens_of(ledger: Path) -> Path:
    """The directory of the tokens. Each lets one execution keep the lock."""
    return ledger.with_suffix(".tokens")


def holders_of(ledger: Path) -> Path:
    """The file of the executions that took a token."""
    return ledger.with_suffix(".holders")


def _takes_token(tokens: Path) -> bool:
    for token in tokens.glob("*"):
        with suppress(FileNotFoundError):  # another execution was faster
            token.unlink()
            return True
    return False


def _append(path: Path, line: Line) -> None:
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, msgspec.json.encode(line) + b"\n")
    finally:
        os.close(file)


def read(path: Path) -> list[Line]:
    """All executions of such a file. A line that its worker did not finish does not count."""
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    return [msgspec.json.decode(line, type=Line) for line in lines[:-1]]
