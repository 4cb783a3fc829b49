"""Events gathered for a screen, by the clock of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from tokenbus.events.public import PublicEvent
from tokenbus.shaping.coalesce import HOLD_S, MOST, Coalescer


async def coalesced(
    events: AsyncGenerator[PublicEvent], *, hold_s: float = HOLD_S, most: int = MOST
) -> AsyncGenerator[PublicEvent]:
    """The events of `follow` or `stream`, neighbouring chunks of a block joined: see `Coalescer`, whose bounds these
    are.

    One event ahead is taken of the source, which is closed with this. What the source raises is raised after what came
    before it. Raises ValueError for bounds below 0.
    """
    gather = Coalescer(hold_s=hold_s, most=most)
    now = asyncio.get_running_loop().time
    coming: asyncio.Task[PublicEvent] | None = None
    try:
        while True:
            coming = coming or asyncio.ensure_future(events.__anext__())
            if gather.due is not None:
                await asyncio.wait({coming}, timeout=max(0.0, gather.due - now()))
                if not coming.done():
                    for event in gather.flush():
                        yield event
            await asyncio.wait({coming})
            done, coming = coming, None
            if done.exception():
                for event in gather.flush():
                    yield event
                if isinstance(done.exception(), StopAsyncIteration):
                    return
            for event in gather.feed(done.result(), now()):
                yield event
    finally:
        if coming:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
        await events.aclose()
