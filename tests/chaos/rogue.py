"""A policy that does harm at random: it blocks, exits, raises, allocates or returns late. Its ``on_error`` is pass, so
the output of its runs, and of all other runs, is the same as without it.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from typing import Any

from tokenbus.policy.processor import StreamContext, StreamProcessor
from tokenbus.policy.stream_state import StreamState

TIMEOUT_S = 1.5
MEMORY_BYTES = 128 * 2**20
LONGEST_S = 45.0
"""Time for all of its starts, with the wait for an executor for each."""
_HARMFUL = 0.02
"""Share of its calls that do harm."""
_chance = random.SystemRandom()  # each forked process has its own


class Rogue(StreamProcessor):
    """Passes everything through, if it returns."""

    async def on_chunk(self, chunk: Any, state: StreamState, context: StreamContext[Any]) -> None:
        if _chance.random() < _HARMFUL:
            await _chance.choice(_HARM)()
        await context.send(chunk)


async def _blocks() -> None:
    time.sleep(60)  # noqa: ASYNC251 - which is the harm


async def _naps() -> None:
    time.sleep(1.2)  # noqa: ASYNC251


async def _exits() -> None:
    os._exit(5)


async def _raises() -> None:
    raise RuntimeError("on purpose")


async def _takes_all() -> None:
    bytearray(2**40)


async def _allocates() -> None:
    taken: list[bytearray] = []
    while True:
        taken.append(bytearray(b"x" * 2**25))
        await asyncio.sleep(0)


async def _late() -> None:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        await asyncio.sleep(0.3)


_HARM = (_blocks, _naps, _exits, _raises, _takes_all, _allocates, _late)
