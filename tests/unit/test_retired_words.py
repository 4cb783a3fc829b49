"""Names that were riddles are retired: each has a standard word now, and none comes back as an identifier."""

from __future__ import annotations

import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RETIRED = {
    "Acknowledging": "OffsetCommitter",
    "Admission": "FairQueue",
    "Asides": "BackgroundTasks",
    "Asked": "ModelRequest",
    "AskingClient": "PolicyClient",
    "Commits": "Committer",
    "Court": "PolicyService",
    "DeadEntry": "DeadLetter",
    "Dialect": "StreamFormat",
    "Direct": "FastRedis",
    "FramesNotTaken": "FramesRefused",
    "Hand": "AckTracker",
    "Heard": "ReleasedOutput",
    "HeldRun": "GatedRun",
    "InHand": "ReadBuffer",
    "JudgesSeen": "PolicyStageObserver",
    "Judging": "PolicyRunTask",
    "LET_GO": "BYPASSED",
    "Lags": "Backpressure",
    "Lifter": "ImageOffloader",
    "NotBegun": "NotStarted",
    "Outbound": "PublishQueue",
    "Patience": "StoreRetry",
    "Policing": "PolicyPlan",
    "Progress": "OffsetTracker",
    "ReplayServer": "MockProvider",
    "Ruled": "PolicyVerdicts",
    "RunningLink": "PolicyRunner",
    "Said": "Verdicts, HistoryItem",
    "Seats": "FairSemaphore",
    "Shelf": "ImageStore",
    "Silence": "CallTimeouts",
    "Standing": "RunPosition",
    "Turns": "AttemptRunner",
    "Waits": "WaitingForSlot",
    "born": "numbers_by_origin",
    "bury": "dead_letter",
    "can_go_on": "can_continue",
    "end_lost": "recover_rollback",
    "end_unread": "fail_unreadable",
    "first_heard_ms": "first_visible_ms",
    "give_back": "release",
    "go_on": "continue_turn",
    "in_hand": "counts_as_alive",
    "mute": "discard_outputs",
    "newest_dead": "newest_dead_letters",
    "outlast": "retry_until_available",
    "pass_over": "skip",
    "put_off": "add_part",
    "put_out": "build_commit",
    "screened": "apply_policies",
    "send_many": "run_scripts",
    "share_of": "fair_share",
    "take_broken": "pop_unreadable",
    "teller": "worker",
    "tellers": "workers_without_progress",
    "told_calls": "emitted_calls",
    "understand": "interpret",
    "unsettled": "replay_unfinished",
    "vanish": "expire",
}
"""A retired identifier, and the word that stands in its place."""


def identifiers(source: str) -> Iterator[tuple[str, int]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            yield token.string, token.start[0]


def retired_in(source: str) -> list[str]:
    return [f"line {line}: {name}, use {RETIRED[name]}" for name, line in identifiers(source) if name in RETIRED]


@pytest.mark.parametrize("room", ["shared", "services"])
def test_no_retired_word_is_an_identifier(room: str) -> None:
    found = {
        str(path.relative_to(ROOT)): words
        for path in sorted((ROOT / room).rglob("*.py"))
        if (words := retired_in(path.read_text()))
    }
    assert found == {}


def test_a_retired_word_would_be_found_as_a_name_and_not_in_prose() -> None:
    assert retired_in("class Court:\n    pass\n") == ["line 1: Court, use PolicyService"]
    assert retired_in('"""A Court of law."""  # put_out\n') == []
