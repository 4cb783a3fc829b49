"""Policies for the tests of executors: they take memory that no mark shows, are refused it, or end their process."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from tokenbus.policy.processor import StreamContext, StreamProcessor
from tokenbus.policy.stream_state import StreamState

MEMORY_BYTES = 2**27
"""What an executor may have."""


class Hoards(StreamProcessor):
    """Takes most of what its executor may have, and keeps it. It writes nothing there, so no step seems to grow."""

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._taken = b""

    async def on_chunk(self, chunk: Any, state: StreamState, context: StreamContext[Any]) -> None:
        self._taken = self._taken or bytes(MEMORY_BYTES * 3 // 4)
        await context.send(chunk)


class Wants(StreamProcessor):
    """Takes what it may take, for a moment."""

    async def on_chunk(self, chunk: Any, state: StreamState, context: StreamContext[Any]) -> None:
        bytes(MEMORY_BYTES // 2)
        await context.send(chunk)


class ExitsLater(StreamProcessor):
    """Ends its process in a thread, outside of every call."""

    async def on_chunk(self, chunk: Any, state: StreamState, context: StreamContext[Any]) -> None:
        threading.Timer(0.1, lambda: os._exit(3)).start()
        await context.send(chunk)


class LeavesChild(StreamProcessor):
    """Forks a process, which inherits the executor's connection, and may end its own. Says the child's id in a file."""

    class Options(msgspec.Struct):
        file: str
        exits: bool

    async def on_chunk(self, chunk: Any, state: StreamState, context: StreamContext[Any]) -> None:
        if (child := os.fork()) == 0:
            time.sleep(60)  # noqa: ASYNC251 - it has no event loop
            os._exit(0)
        Path(self.options.file).write_text(str(child))  # noqa: ASYNC240 - nothing else runs here
        if self.options.exits:
            os._exit(3)
        await context.send(chunk)


class Sleeps(StreamProcessor):
    """Blocks its process, for less than its timeout."""

    async def on_chunk(self, chunk: Any, state: StreamState, context: StreamContext[Any]) -> None:
        time.sleep(3.0)  # noqa: ASYNC251 - that is the harm
        await context.send(chunk)
