"""Where an answer ends because its run waits for somebody. Pure parts only."""

from __future__ import annotations

from typing import Any

from tests.unit.core.run.script import Story, call
from tokenbus.events import normalized as n
from tokenbus.events.frames import ToolReturned, ToolWaits, WaitDecided
from tokenbus.events.public import PublicEvent, Waiting
from tokenbus.events.waits import WaitInfo, WaitKind
from tokenbus_services.gateway.surfaces.parking import Parking, seq_of

ALWAYS, BY_CLIENT = ToolWaits([{}]), ToolWaits(client_ms=7_000)
KINDS: frozenset[WaitKind] = frozenset({"approval", "tool_result"})


def asked(**waits: ToolWaits) -> Story:
    """A turn with calls of `f` and `g`, in blocks 0 and 1."""
    story = Story(waits=waits)
    story.provider(*call(0, "a", "f", "{}"), *call(1, "b", "g", "{}"), n.Done("tool_use"))
    return story


def decided(wait: str, **how: Any) -> WaitDecided:
    return WaitDecided(wait, "approval", "allow", wait, None, "ag_ui", **how)


def info(event: Waiting) -> WaitInfo:
    names = ("run", "wait", "what", "tool_id", "tool_name", "deadline_ms")
    return WaitInfo(since_ms=0, **{name: getattr(event, name) for name in names})


def open_in(events: list[PublicEvent], *over: str) -> list[WaitInfo]:
    return [info(event) for event in events if isinstance(event, Waiting) and event.wait not in over]


def parked(events: list[PublicEvent], *over: str, kinds: frozenset[WaitKind] = KINDS) -> bool:
    parking = Parking()
    for event in events:
        parking.feed(event)
    return parking.is_parked(open_in(events, *over), kinds)


def test_an_answer_ends_once_the_first_call_without_a_result_waits() -> None:
    story = asked(g=ALWAYS)
    assert not parked(story.events), "the result of the first call comes first"
    story.control(ToolReturned(0, "one", False))
    assert parked(story.events)
    story.control(decided("1.0"))
    assert not parked(story.events, "1.0"), "the call runs"


def test_an_answer_ends_after_all_that_its_run_asks_for_at_once() -> None:
    events = asked(f=ALWAYS, g=BY_CLIENT).events
    parking = Parking()
    ends = []
    for event in events:
        parking.feed(event)
        if parking.is_parked(open_in(events), KINDS):
            ends.append(event.seq)
    assert ends == [events[-1].seq]
    assert not parked(events, kinds=frozenset({"approval"})), "the client cannot return results"


def test_what_was_decided_meanwhile_ends_no_answer() -> None:
    events = asked(f=ALWAYS).events
    assert not parked(events, "0.0")


def test_an_answer_that_goes_on_begins_where_the_one_before_ended() -> None:
    story = asked(f=ALWAYS, g=ALWAYS)
    ended = story.events[-1].seq
    assert seq_of(story.events, {"0.0"}) == ended
    story.control(decided("1.0"), decided("0.0"))
    story.control(ToolReturned(0, "one", False), ToolReturned(1, "two", False))
    assert seq_of(story.events, {"0.0"}) == seq_of(story.events, {"0.0", "1.0"}) == ended


def test_what_a_run_waits_for_after_an_approval_is_a_place_of_its_own() -> None:
    story = asked(f=ToolWaits([{}], client_ms=5_000))
    story.control(decided("0.0"))
    assert parked(story.events, "0.0")
    assert seq_of(story.events, {"0.1"}) == story.events[-1].seq
