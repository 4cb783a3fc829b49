"""The origin of each event, however long its deferral takes."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.public import BlockComplete, BlockStarted, Chunk, PublicEvent, Retrying
from tokenbus.policy.policy_runner import BoundPolicy, PolicyStream
from tokenbus.policy.processor import NewText, StreamProcessor
from tokenbus.policy.public import PublicEvents
from tokenbus_services.policy_stage.provenance import OriginOutput, Provenance, TracedEvents

BROKEN = ErrorInfo(code="timeout", kind="timeout", message="broke off", retryable=True)


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
    trace = Provenance()
    links = [BoundPolicy("off", PutsOff(known)), BoundPolicy("all", StreamProcessor())]
    stream = PolicyStream(links, TracedEvents(PublicEvents(lambda: 0), trace), run="r")
    found: dict[tuple[int, str], tuple[list[str], list[str]]] = {}

    def note(out: list[PublicEvent]) -> None:
        for known in trace.take(out):
            at = known.origin.draft, known.origin.part
            assert at not in found, "an origin is reported once"
            found[at] = ([e.text for e in known.events if isinstance(e, Chunk)], known.later)

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


class Judges(StreamProcessor):
    """Puts each text off once it is complete, and lets it out; ends the stream at a retry, if it is to."""

    def __init__(self, known: asyncio.Event, *, ends: bool = False) -> None:
        super().__init__()
        self._known = known
        self._ends = ends
        self._held: list[Any] = []

    async def on_chunk(self, chunk: Any, state: Any, context: Any) -> None:
        if isinstance(chunk, Retrying):
            await context.send(chunk)
            if self._ends:
                context.terminate("enough")
            return
        self._held.append(chunk)
        if done := state.just_completed:
            held, self._held = self._held, []
            context.later(self._judged(held, done, context))

    async def _judged(self, held: list[Any], done: Any, context: Any) -> list[Any]:
        await self._known.wait()
        context.decided("replace", done, final="ab")
        return held


async def in_one_take(*policies: StreamProcessor, known: asyncio.Event) -> list[OriginOutput]:
    """The provenance after a retry that reveals all output deferred before it."""
    trace = Provenance()
    links = [BoundPolicy(str(n), policy) for n, policy in enumerate(policies)]
    stream = PolicyStream(links, TracedEvents(PublicEvents(lambda: 0), trace), run="r")
    for draft in drafts():
        trace.draft(draft)
        trace.take(await stream.feed(draft))
    known.set()
    retry = Retrying(run="r", seq=4, turn=0, attempt=1, drop_from=0, next_attempt=2, delay_ms=0, error=BROKEN)
    trace.draft(retry)
    taken = trace.take(await stream.feed(retry))
    await stream.close()
    return taken


async def through_one(known: asyncio.Event, *, ends: bool = False) -> list[OriginOutput]:
    return await in_one_take(Judges(known, ends=ends), known=known)


async def through_two(known: asyncio.Event, *, ends: bool = False) -> list[OriginOutput]:
    return await in_one_take(StreamProcessor(), Judges(known, ends=ends), known=known)


@pytest.mark.parametrize("through", [through_one, through_two])
async def test_deferred_output_comes_before_the_retry_that_makes_it_void(through: Any) -> None:
    taken = await through(asyncio.Event())
    assert [(k.origin.draft, k.origin.part) for k in taken] == [(3, "1"), (4, "")]
    assert [e.text for e in taken[0].events if isinstance(e, Chunk)] == ["a", "b"]
    assert [type(e) for e in taken[1].events] == [Retrying]


async def test_a_decision_belongs_to_the_work_that_took_it() -> None:
    taken = await through_one(asyncio.Event())
    assert [[d.final for d in k.decisions] for k in taken] == [["ab"], []]


async def test_the_end_belongs_to_the_draft_at_which_the_policy_ended_the_stream() -> None:
    taken = await through_one(asyncio.Event(), ends=True)
    assert [k.ends for k in taken] == [False, True]
    assert [[d.action for d in k.decisions] for k in taken] == [["replace"], ["terminate"]]
