"""Which events a subscriber wants."""

from __future__ import annotations

from typing import Any

import pytest

from tokenbus.client.subscriptions.topic_reader import Selection
from tokenbus.events.public import (
    BlockComplete,
    BlockStarted,
    Chunk,
    Completed,
    PublicEvent,
    Started,
    Timing,
    ToolProgress,
    UnknownEvent,
)

AT: dict[str, Any] = {"run": "r", "seq": 0, "turn": 0, "attempt": 1}
STARTED = Started(**AT, provider="p", model="m")
TEXT = BlockStarted(**AT, block=0, kind="text")
CHUNK = Chunk(**AT, block=0, kind="text", text="a", visible=True, depth=0)
REPLY = BlockComplete(**AT, block=0, kind="text", content="a")
CALL = BlockStarted(**AT, block=1, kind="tool_call")
CALLED = BlockComplete(**AT, block=1, kind="tool_call", arguments="{}")
ENDED = Completed(**AT, finish="stop", timing=Timing(total_ms=1))
PROGRESS = ToolProgress(**AT, block=1, tool_id="t", tool_name="f", progress=1)


UNKNOWN = UnknownEvent(**AT, event_type="sung", fields={})


@pytest.mark.parametrize(
    ("topic", "kinds", "wanted"),
    [
        ("blocks", None, [TEXT, REPLY, CALL, CALLED, PROGRESS, UNKNOWN]),
        ("blocks", ["block_complete"], [REPLY, CALLED]),
        ("blocks", BlockComplete, [REPLY, CALLED]),
        ("blocks", [BlockComplete, BlockStarted], [TEXT, REPLY, CALL, CALLED]),
        ("blocks", ["tool_call"], [CALL, CALLED]),
        ("blocks", [BlockComplete, "tool_call"], [CALLED]),
        ("blocks", "tool_progress", [PROGRESS]),
        ("chunks", "chunk", [CHUNK]),
        ("visible", ["thinking"], []),
        ("runs", ["started", "completed"], [STARTED, ENDED]),
        ("runs", [], []),
    ],
)
def test_kinds_are_types_of_events_and_kinds_of_blocks(topic: Any, kinds: Any, wanted: list[PublicEvent]):
    selection = Selection(topic, kinds)
    on_topic = {"blocks": [TEXT, REPLY, CALL, CALLED, PROGRESS], "runs": [STARTED, ENDED]}.get(topic, [CHUNK])
    assert [event for event in [*on_topic, UNKNOWN] if selection.wants(event)] == wanted


@pytest.mark.parametrize(
    ("topic", "kind", "problem"),
    [
        ("visible", "chnk", "did you mean 'chunk'"),
        ("blocks", "blok_complete", "did you mean 'block_complete'"),
        ("runs", "text", "kinds of runs: unknown 'text'"),
        ("visible", Completed, "kinds of visible: unknown 'completed'"),
        ("blocks", str, "unknown"),
    ],
)
def test_a_kind_that_the_topic_never_has_is_refused_with_the_nearest(topic: Any, kind: Any, problem: str):
    with pytest.raises(ValueError, match=problem):
        Selection(topic, [kind])


@pytest.mark.parametrize("runs", ["r", ["r"], {"r", "s"}, lambda run: run == "r"])
def test_runs_are_selected_by_name_or_by_a_predicate(runs: Any):
    assert Selection("visible", runs=runs).wants(CHUNK)
    assert not Selection("visible", runs=["s"]).wants(CHUNK)


def test_a_set_of_runs_may_grow_while_it_is_in_use():
    runs: set[str] = set()
    selection = Selection("visible", runs=runs)
    assert not selection.wants(CHUNK)
    runs.add("r")
    assert selection.wants(CHUNK)
