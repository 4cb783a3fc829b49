"""Joins neighbouring chunks for display, by the event loop's clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from tokenbus.bus.liveness import stop_task
from tokenbus.events.public import PublicEvent
from tokenbus.shaping.sentences import HOLD_S, MOST, Coalescer


async def coalesced(
    events: AsyncGenerator[PublicEvent], *, hold_s: float = HOLD_S, most: int = MOST
) -> AsyncGenerator[PublicEvent]:
    """Yield the events of `follow` or `stream` with neighbouring chunks of a block joined.

    A chunk waits for at most ``hold_s`` seconds, and joined text is sent once it has ``most`` characters or more.
    Reads one event ahead of the source and closes the source on exit. If the source raises, earlier events are yielded
    first. Raises ValueError for bounds below 0.
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
        await stop_task(coming)
        await events.aclose()
