"""A tool and a policy that wait until their test opens the gate that the model named."""

from __future__ import annotations

from collections import defaultdict
from threading import Event
from typing import Any

from tests.waiting import eventually
from tokenbus.events.public import Chunk

HELD = "held:"
"""A text that begins with this is judged until its gate is open: `held:NAME`."""
_gates: defaultdict[str, Event] = defaultdict(Event)


def open_gate(name: str) -> None:
    """Let through what waits there, and what comes later."""
    _gates[name].set()


async def wait(gate: str) -> str:
    """The tool."""
    await eventually(_gates[gate].is_set)
    return "open"


async def hold(chunk: Any, state: Any, context: Any) -> None:
    """The policy."""
    if isinstance(chunk, Chunk) and chunk.text.startswith(HELD):
        await wait(chunk.text.removeprefix(HELD).strip())
        context.decided("replace", state.current_block, reason="it said too much", final="[kept back]")
        await context.send(context.with_text(chunk, "[kept back]"))
        return
    await context.send(chunk)
