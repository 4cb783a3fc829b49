"""Where each event comes from, whatever time what was put off takes."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from tokenbus.events.public import BlockComplete, BlockStarted, Chunk, PublicEvent
from tokenbus.policy.link import Link
from tokenbus.policy.processor import NewText, StreamProcessor
from tokenbus.policy.public_events import PublicEvents
from tokenbus.policy.stream import PolicyStream
from tokenbus_services.policy.tracing import Trace, TracedEvents


class PutsOff(StreamProcessor):
    """Puts each piece of text off, until its event in ``known`` is set, and drops the block's beginning and end."""

    def __init__(self, known: dict[str, asyncio.Event]) -> None:
        super().__init__()
        self._known = known

    async def on_chunk(self, chunk: Any, state: Any, context: Any) -> None:
        if not isinstance(chunk, Chunk):
            return

        async def later() -> list[NewText]:
            await self._known[chunk.text].wait()
            return [NewText(chunk.text.upper())]

        context.later(later())


def drafts() -> list[PublicEvent]:
    at: dict[str, Any] = {"run": "r", "turn": 0, "attempt": 1, "block": 0, "kind": "text"}
    return [
        BlockStarted(seq=0, **at),
        Chunk(seq=1, text="a", visible=True, depth=0, **at),
        Chunk(seq=2, text="b", visible=True, depth=0, **at),
        BlockComplete(seq=3, content="ab", **at),
    ]


async def judged(order: str) -> dict[tuple[int, str], tuple[list[str], list[str]]]:
    """What each origin came to: its texts, and the parts put off under it."""
    known = {"a": asyncio.Event(), "b": asyncio.Event()}
    trace = Trace()
    links = [Link("off", PutsOff(known)), Link("all", StreamProcessor())]
    stream = PolicyStream(links, TracedEvents(PublicEvents(lambda: 0), trace), run="r")
    found: dict[tuple[int, str], tuple[list[str], list[str]]] = {}

    def note(out: list[PublicEvent]) -> None:
        for origin, events, later in trace.take(out):
            assert (origin.draft, origin.part) not in found, "an origin is told once"
            texts = [e.text for e in events if isinstance(e, Chunk)]
            found[origin.draft, origin.part] = (texts, later)

    for draft in drafts():
        trace.draft(draft)
        note(await stream.feed(draft))
        if msgspec.structs.asdict(draft).get("text") == order[0]:
            known[order[0]].set()
            await asyncio.sleep(0)
    for text in order:
        known[text].set()
    while stream.pending:
        await asyncio.wait(stream.pending)
        note(await stream.collect())
    await stream.close()
    return found


@pytest.mark.parametrize("order", ["ab", "ba"])
async def test_an_event_has_the_same_origin_whenever_it_is_known(order: str) -> None:
    assert await judged(order) == {
        (0, ""): ([], []),
        (1, ""): ([], ["1"]),
        (2, ""): ([], ["1"]),
        (3, ""): ([], []),
        (1, "1"): (["A"], []),
        (2, "1"): (["B"], []),
    }
