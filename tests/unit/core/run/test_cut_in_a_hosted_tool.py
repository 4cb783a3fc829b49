"""An answer with hosted tools that is cut at any of its events, and then goes on, elsewhere or not at all: every block
ends, nothing of a tool is visible, and what counts has each item and each text once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.e2e import judge
from tests.unit.core.run.script import Story, item, text
from tokenbus.client.response import Response
from tokenbus.events import normalized as n
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import BusEvent, CancelRequested, FallbackPlan
from tokenbus.events.public import TERMINAL, BlockComplete, Completed, PublicEvent
from tokenbus.events.requests import ExtraPart, OnFailure

BUSY = ErrorInfo(code="overloaded_error", kind="overloaded", message="busy", retryable=True)
START = n.Start("m", "r", api="openai-responses", provider="openai-responses")
SEARCH = '{"type":"web_search_call","id":"ws_1"}'
CODE = '{"type":"code_interpreter_call","id":"ci_1"}'
ANSWER: list[BusEvent] = [
    START,
    n.BlockStart(0, "thinking"),
    n.ThinkingDelta(0, "Hm"),
    n.BlockStop(0),
    n.ItemStart(1, "openai-responses.web_search_call", "web_search", "ws_1"),
    n.ItemProgress(1, "searching"),
    n.ToolCallDelta(1, SEARCH[:9]),
    n.ToolCallDelta(1, SEARCH[9:]),
    n.BlockStop(1),
    n.BlockStart(2, "text"),
    n.TextDelta(2, "One "),
    n.ItemStart(3, "openai-responses.code_interpreter_call", "code_interpreter", "ci_1"),  # while the text is open
    n.ToolCallDelta(3, CODE[:9]),
    n.TextDelta(2, "two"),
    n.ToolCallDelta(3, CODE[9:]),
    n.BlockStop(2),
    n.BlockStop(3),
    n.BlockStart(4, "text"),
    n.TextDelta(4, "three"),
    n.BlockStop(4),
]
AGAIN: list[BusEvent] = [
    n.Start("m2", "r2", api="anthropic", provider="anthropic"),
    *item(0, "anthropic.server_tool_use", '{"type":"server_tool_use"}', "web_search", "s1"),
    *text(1, "Again."),
]
DONE = n.Done("stop", "stop")
WAYS: list[tuple[OnFailure, dict[str, Any]]] = [
    ("before_first_visible", {}),
    ("before_first_visible", {"fallback": (FallbackPlan("second", "b"),)}),
    ("before_first_output", {}),
    ("fail", {}),
    ("restart", {}),
    ("continue", {"continues": True}),
    ("continue", {"continues": False, "fallback": (FallbackPlan("second", "b", continues=True),)}),
]
CUTS: dict[str, BusEvent] = {"fails": n.Failed(BUSY), "ends": n.Cut("the body ended"), "cancelled": CancelRequested()}


def played(cut_at: int, way: tuple[OnFailure, dict[str, Any]], cut: BusEvent, *, reborn: bool) -> list[PublicEvent]:
    story = Story(on_failure=way[0], **way[1])
    story.provider(*ANSWER[:cut_at])
    if reborn:
        story.reborn()
    if isinstance(cut, CancelRequested):
        story.control(cut)
        story.provider(*ANSWER[cut_at:], DONE, attempt=1)  # its fetcher hears of it later
    else:
        story.provider(cut)
    for _ in range(6):
        if not story.run.over:
            story.provider(*AGAIN, DONE)
    return story.events


def own_items(events: list[PublicEvent]) -> list[str]:
    return [part.json for m in Response.of(events).messages for part in m.content if isinstance(part, ExtraPart)]


@pytest.mark.parametrize("reborn", [False, True], ids=["", "restored"])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way[0]} {' '.join(way[1])}".strip())
def test_an_answer_that_is_cut_at_any_event(way: tuple[OnFailure, dict[str, Any]], cut: BusEvent, reborn: bool) -> None:
    for cut_at in range(1, len(ANSWER) + 1):
        events = played(cut_at, way, cut, reborn=reborn)
        log: judge.Log = msgspec.json.decode(msgspec.json.encode(events))
        judge.check(log)
        end = events[-1]
        assert isinstance(end, TERMINAL)
        response = Response.of(events)
        items = own_items(events)
        assert len(items) == len(set(items)), (cut_at, items)
        whole = {b.block for b in response.blocks if b.kind == "server_tool" and not b.cut}
        assert len(whole) == len(items), "an item that was cut is nobody's"
        if isinstance(end, Completed):
            assert response.text.endswith("Again.")
            if way[0] != "continue":
                assert [(b.kind, b.content) for b in response.blocks if b.kind == "text"] == [("text", "Again.")]
        for event in events:
            if isinstance(event, BlockComplete) and event.kind == "server_tool" and not event.cut:
                msgspec.json.decode(event.content or "")
