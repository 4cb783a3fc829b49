"""How far the entries of a partition are done."""

from __future__ import annotations

from itertools import permutations

from tokenbus.client.subscriptions.ack_tracker import AckTracker, OffsetTracker
from tokenbus.events.public import Chunk


def given(*entries: str) -> OffsetTracker:
    progress = OffsetTracker("0-0")
    for entry in entries:
        progress.delivered(entry)
    return progress


def chunk(seq: int) -> Chunk:
    return Chunk(run="r", seq=seq, turn=0, attempt=1, block=0, kind="text", text="", visible=True, depth=0)


def test_the_position_is_the_last_entry_before_which_nothing_is_open():
    entries = ["1-0", "2-0", "3-0"]
    for order in permutations(entries):
        progress = given(*entries)
        done: set[str] = set()
        for entry in order:
            progress.done(entry)
            done.add(entry)
            before = [e for i, e in enumerate(entries) if set(entries[: i + 1]) <= done]
            assert progress.position == (before[-1] if before else "0-0")
            assert (progress.entries, progress.open) == (len(before), 3 - len(done))


def test_done_twice_and_done_without_being_given_are_nothing():
    progress = given("1-0", "2-0")
    for _ in range(2):
        progress.done("2-0")
        progress.done("9-0")
    assert (progress.position, progress.open) == ("0-0", 1)


def test_an_event_delivered_again_while_in_progress_is_not_handled_twice_and_its_end_counts_for_the_newer_entry():
    old, new = given("1-0"), given("1-0")
    hand = AckTracker("visible")
    assert hand.delivered(chunk(0), old, "1-0")
    assert not hand.delivered(chunk(0), new, "1-0")
    assert new.open == 1
    assert hand.done(chunk(0))
    assert new.position == "1-0"
    assert not hand.done(chunk(0))
