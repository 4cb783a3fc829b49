"""Policies that do harm at the beginning of a text, and write a line in the directory MARKS for each start."""

from __future__ import annotations

import asyncio
import os
import time
from abc import abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from tokenbus.events.public import Chunk
from tokenbus.policy.processor import StreamContext, StreamProcessor
from tokenbus.policy.stream_state import StreamState


class After(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When the harm is done."""

    chunks: int = 1
    """With which chunk of text."""


class Bad(StreamProcessor):
    """Lets everything through, up to that chunk."""

    Options = After

    def __init__(self, options: After) -> None:
        super().__init__(options)
        self._chunks = 0

    async def on_chunk(self, chunk: Any, state: StreamState, context: StreamContext[Any]) -> None:
        self._chunks += isinstance(chunk, Chunk)
        if isinstance(chunk, Chunk) and self._chunks == self.options.chunks:
            with (Path(os.environ["MARKS"]) / f"{type(self).__name__}-{context.run}").open("a") as starts:
                starts.write(f"{os.getpid()}\n")
            await self.harm(chunk, context)
        await context.send(chunk)

    @abstractmethod
    async def harm(self, chunk: Any, context: StreamContext[Any]) -> None: ...


class Sleeps(Bad):
    """Blocks its thread."""

    async def harm(self, chunk: Any, context: StreamContext[Any]) -> None:
        time.sleep(3600)  # noqa: ASYNC251 - which is the harm


class Naps(Bad):
    """Blocks its thread for a while that its timeout allows."""

    async def harm(self, chunk: Any, context: StreamContext[Any]) -> None:
        time.sleep(3.5)  # noqa: ASYNC251 - which is the harm


class Exits(Bad):
    """Ends its process."""

    async def harm(self, chunk: Any, context: StreamContext[Any]) -> None:
        os._exit(3)


class ExitsLater(Bad):
    """Ends its process in a work that it put off."""

    async def harm(self, chunk: Any, context: StreamContext[Any]) -> None:
        context.later(self._exit())

    async def _exit(self) -> list[str]:
        await asyncio.sleep(0.1)
        os._exit(3)


class Raises(Bad):
    async def harm(self, chunk: Any, context: StreamContext[Any]) -> None:
        raise RuntimeError("on purpose")


class Allocates(Bad):
    """Takes memory without an end, a little in each step."""

    async def harm(self, chunk: Any, context: StreamContext[Any]) -> None:
        taken: list[bytearray] = []
        while True:
            taken.append(bytearray(b"x" * 2**25))
            await asyncio.sleep(0)


class TakesAll(Bad):
    """Asks for more memory than there is."""

    async def harm(self, chunk: Any, context: StreamContext[Any]) -> None:
        bytearray(2**40)


class Never(Bad):
    """Waits for what never comes."""

    async def harm(self, chunk: Any, context: StreamContext[Any]) -> None:
        await asyncio.Event().wait()


class Deaf(Bad):
    """The same, and does not let itself be cancelled."""

    async def harm(self, chunk: Any, context: StreamContext[Any]) -> None:
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()


class Late(Bad):
    """Comes to an end after its timeout, as if nothing were the matter."""

    async def harm(self, chunk: Any, context: StreamContext[Any]) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0.5)


class Strange(StreamProcessor):
    """Takes other arguments than its options."""

    def __init__(self, options: Any, strict: bool) -> None:
        super().__init__(options)


class ImpatientAtStart(StreamProcessor):
    """Ends the interpreter while it is made."""

    def __init__(self, options: Any = None) -> None:
        raise SystemExit(3)
