"""What is reported as heard of a turn, without a framework."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

import pytest

from tests.integrations.voice import HEARD, running_bus
from tests.waiting import eventually
from tokenbus import Cancelled, Client
from tokenbus.integrations.voice_turn import VoiceTurn, VoiceTurns
from tokenbus.testing import LocalBus


@pytest.fixture(scope="module")
def local() -> Iterator[LocalBus]:
    with running_bus() as bus:
        yield bus


@pytest.fixture
async def bus(local: LocalBus) -> AsyncGenerator[Client]:
    async with local.client() as client:
        yield client


@pytest.fixture
def turns(bus: Client) -> VoiceTurns:
    return VoiceTurns(bus, told_of_speech=True, heard_wait_s=600)  # a test that waits for it does not end


async def generated(local: LocalBus, turns: VoiceTurns, model: str = "long") -> VoiceTurn:
    """A turn whose text has arrived so far as it can."""
    turn = turns.begin(local.request(model))
    async with aclosing(turn.texts()) as texts:
        async for _ in texts:
            if model == "long" and turn.heard.overlap(HEARD) == len(HEARD.replace(" ", "")):
                break
    return turn


async def end_of(bus: Client, turn: VoiceTurn) -> Cancelled:
    async for event in bus.follow(turn.run):
        if isinstance(event, Cancelled):
            return event
    raise AssertionError("it was not cancelled")


async def test_a_barge_in_before_a_word_was_spoken_reports_that_nothing_was_heard(
    local: LocalBus, bus: Client, turns: VoiceTurns
) -> None:
    turn = await generated(local, turns)
    turns.leave(turn)
    assert (await end_of(bus, turn)).heard_through == -1
    later = turns.begin(local.request("text"))
    assert later._request["metadata"]["heard"] == {"run": turn.run, "through": -1}


@pytest.mark.parametrize("spoken", [True, False])
async def test_a_hang_up_ends_the_wait_for_what_was_spoken(
    local: LocalBus, bus: Client, turns: VoiceTurns, spoken: bool
) -> None:
    turn = await generated(local, turns)
    turns.speaks(spoken)
    turns.leave(turn)
    await turns.aclose()
    assert (await end_of(bus, turn)).heard_through == (None if spoken else -1)


async def test_what_was_heard_belongs_to_the_turn_before_alone(local: LocalBus, turns: VoiceTurns) -> None:
    first = await generated(local, turns, "text")
    turns.speaks(True)
    turns.spoken(HEARD, interrupted=False)
    turns.speaks(False)
    second = await generated(local, turns, "text")
    third = turns.begin(local.request("text"))
    assert second._request["metadata"]["heard"] == {"run": first.run, "through": first.through}
    assert "metadata" not in third._request


async def test_turns_with_the_same_first_words_are_not_confused(local: LocalBus, turns: VoiceTurns) -> None:
    """The first is spoken and reported late, the second is not spoken, and the third is."""
    first = await generated(local, turns, "text")
    turns.speaks(True)
    turns.speaks(False)
    second = await generated(local, turns, "text")
    turns.spoken(HEARD, interrupted=False)
    assert (first.spoken.done(), second.spoken.done()) == (True, False)
    third = await generated(local, turns, "text")
    turns.speaks(True)
    turns.spoken(HEARD, interrupted=False)
    assert (second.spoken.done(), third.spoken.done()) == (False, True)


async def test_a_turn_that_is_spoken_is_cancelled_when_the_framework_has_said_how_far(
    local: LocalBus, bus: Client, turns: VoiceTurns
) -> None:
    turn = await generated(local, turns)
    turns.speaks(True)
    turns.leave(turn)
    await eventually(lambda: turns._leaving)
    turns.spoken(HEARD, interrupted=False)
    end = await end_of(bus, turn)
    assert end.heard_through == turn.heard.through(HEARD) > -1
