"""A policy that hangs from the moment at which a file `hang` exists in the directory MARKS."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import msgspec

from tokenbus.policy.processor import StreamContext, StreamProcessor
from tokenbus.policy.stream_state import StreamState


class Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """No options."""


class Guard(StreamProcessor):
    """Passes everything through, until it hangs."""

    Options = Nothing

    async def on_chunk(self, chunk: Any, state: StreamState, context: StreamContext[Any]) -> None:
        if (Path(os.environ["MARKS"]) / "hang").exists():
            await asyncio.Event().wait()
        await context.send(chunk)
