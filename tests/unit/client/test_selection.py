"""Which events a subscriber wants."""

from __future__ import annotations

from typing import Any

import pytest

from tokenbus.client.selection import Selection
from tokenbus.events.public import (
    BlockComplete,
    BlockStarted,
    Chunk,
    Completed,
    PublicEvent,
    Started,
    Timing,
    ToolProgress,
)

AT: dict[str, Any] = {"run": "r", "seq": 0, "turn": 0, "attempt": 1}
STARTED = Started(**AT, provider="p", model="m")
TEXT = BlockStarted(**AT, block=0, kind="text")
CHUNK = Chunk(**AT, block=0, kind="text", text="a", visible=True, depth=0)
SAID = BlockComplete(**AT, block=0, kind="text", content="a")
CALL = BlockStarted(**AT, block=1, kind="tool_call")
CALLED = BlockComplete(**AT, block=1, kind="tool_call", arguments="{}")
ENDED = Completed(**AT, finish="stop", timing=Timing(total_ms=1))
PROGRESS = ToolProgress(**AT, block=1, tool_id="t", tool_name="f", progress=1)
ALL: list[PublicEvent] = [STARTED, TEXT, CHUNK, SAID, CALL, CALLED, PROGRESS, ENDED]


@pytest.mark.parametrize(
    ("kinds", "wanted"),
    [
        (None, ALL),
        (["block_complete"], [SAID, CALLED]),
        (["tool_call"], [CALL, CALLED]),
        (["block_complete", "tool_call"], [CALLED]),
        (["block_complete", "tool_call", "completed"], [CALLED, ENDED]),
        ("tool_progress", [PROGRESS]),
        ("chunk", [CHUNK]),
        ([], []),
    ],
)
def test_kinds_are_types_of_events_and_kinds_of_blocks(kinds: Any, wanted: list[PublicEvent]):
    selection = Selection(kinds)
    assert [event for event in ALL if selection.wants(event)] == wanted


def test_a_kind_that_there_is_not_is_refused_by_name():
    with pytest.raises(ValueError, match="sentence"):
        Selection(["chunk", "sentence"])


@pytest.mark.parametrize("runs", ["r", ["r"], {"r", "s"}, lambda run: run == "r"])
def test_runs_are_named_or_told_by_a_predicate(runs: Any):
    assert Selection(runs=runs).wants(CHUNK)
    assert not Selection(runs=["s"]).wants(CHUNK)


def test_a_set_of_runs_may_grow_while_it_is_in_use():
    runs: set[str] = set()
    selection = Selection(runs=runs)
    assert not selection.wants(CHUNK)
    runs.add("r")
    assert selection.wants(CHUNK)
