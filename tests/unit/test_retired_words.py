"""Names that were riddles are retired: each has a standard word now, and none comes back as an identifier, in the
name of a log event, or in the name or label of a metric.
"""

from __future__ import annotations

import ast
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
    "SAID": "REPLY",
    "Said": "Verdicts, HistoryItem",
    "Seats": "FairSemaphore",
    "Shelf": "ImageStore",
    "Silence": "CallTimeouts",
    "Stand": "a scene",
    "Standing": "RunPosition",
    "Told": "EventFactory",
    "Turns": "AttemptRunner",
    "Waits": "WaitingForSlot",
    "born": "numbers_by_origin",
    "buried": "dead_letters",
    "bury": "dead_letter",
    "can_go_on": "can_continue",
    "end_lost": "recover_rollback",
    "end_unread": "fail_unreadable",
    "first_heard_ms": "first_visible_ms",
    "give_back": "release",
    "go_on": "continue_turn",
    "hears": "is_streaming",
    "in_hand": "counts_as_alive",
    "mute": "discard_outputs",
    "newest_dead": "newest_dead_letters",
    "outlast": "retry_until_available",
    "pass_over": "skip",
    "put_off": "add_part",
    "put_out": "build_commit",
    "said": "text, answer, events",
    "screened": "apply_policies",
    "send_many": "run_scripts",
    "share_of": "fair_share",
    "stand": "scene",
    "standing": "position",
    "take_broken": "pop_unreadable",
    "tell": "play, report, publish",
    "teller": "worker",
    "tellers": "workers_without_progress",
    "tells": "reports",
    "told": "published, emitted, expected",
    "told_calls": "emitted_calls",
    "understand": "interpret",
    "unsettled": "replay_unfinished",
    "vanish": "expire",
    "whoever": "the role",
}
"""A retired identifier, and its replacement."""
RETIRED_IN_EVENTS = {
    "as": "a state",
    "away": "unavailable",
    "behind": "lag, not_stopped",
    "broke": "failed",
    "goes": "exiting",
    "heard": "received, applied",
    "judging": "policy",
    "kept": "stored, written, renewed",
    "known": "read",
    "left": "not_finished, not_closed",
    "lies": "location",
    "lifted": "offloaded",
    "nobody": "the fact",
    "over": "skipped",
    "said": "confirmed",
    "told": "emitted",
    "vanished": "timed_out",
    "waits": "delayed, interrupted",
    "whoever": "the role",
}
"""A word that operators cannot guess the meaning of in a log event or a metric, and what to say instead."""
LOG_CALLS = {"debug", "info", "warning", "error", "exception", "critical"}
METRICS = {"Counter", "Gauge", "Histogram"}


def identifiers(source: str) -> Iterator[tuple[str, int]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            yield token.string, token.start[0]


def retired_in(source: str) -> list[str]:
    return [f"line {line}: {name}, use {RETIRED[name]}" for name, line in identifiers(source) if name in RETIRED]


@pytest.mark.parametrize("room", ["shared", "services", "tests", "docs/examples"])
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


def names_that_operators_see(source: str) -> Iterator[tuple[str, int]]:
    """The names of log events, and the names and labels of metrics."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        texts = ast.walk(node) if called in METRICS else [node.args[0]] if called in LOG_CALLS else []
        for text in texts:
            if isinstance(text, ast.Constant) and isinstance(text.value, str) and " " not in text.value:
                yield text.value, text.lineno


def riddles_in(source: str) -> list[str]:
    return [
        f"line {line}: {name}: instead of {word!r} say {RETIRED_IN_EVENTS[word]}"
        for name, line in names_that_operators_see(source)
        for word in name.split("_")
        if word in RETIRED_IN_EVENTS
    ]


def test_operators_read_plain_words_in_log_events_and_metrics() -> None:
    sources = {path: path.read_text() for path in sorted((ROOT / "services").rglob("*.py"))}
    seen = [name for source in sources.values() for name, _ in names_that_operators_see(source)]
    assert {"run_started", "tokenbus_images", "location"} <= set(seen)
    found = {str(path.relative_to(ROOT)): words for path, source in sources.items() if (words := riddles_in(source))}
    assert found == {}


def test_a_riddle_would_be_found_in_a_log_event_and_in_a_label() -> None:
    assert riddles_in('log.warning("worker_goes")') == ["line 1: worker_goes: instead of 'goes' say exiting"]
    assert riddles_in('Counter("images", "Where it lies.", ["lies"])') == [
        "line 1: lies: instead of 'lies' say location"
    ]
    assert riddles_in('log.info("run_started")') == []
